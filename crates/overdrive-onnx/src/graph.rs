//! A graph that is being built: nodes in order, constants, and the names of intermediate values.

use std::collections::HashMap;

use tch::Tensor;

use crate::Result;
use crate::initializer::{Data, Element, Initializer};
use crate::proto::{AttributeProto, NodeProto, attribute_type, data_type};

/// The domain of ONNX Runtime's own operators.
pub(crate) const MICROSOFT: &str = "com.microsoft";

/// The name of a value of the graph.
pub(crate) type Value = String;

/// Nodes and constants, in the order in which they were added.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) opset: i64,
    /// The dtype of activations and dense weights.
    pub(crate) float: Element,
    pub(crate) nodes: Vec<NodeProto>,
    pub(crate) initializers: Vec<Initializer>,
    /// The names of the constants by their contents, so that equal constants are written once.
    constants: HashMap<String, Value>,
    /// The codes and scales of inputs that several 8-bit layers share.
    pub(crate) quantized: HashMap<Value, (Value, Value)>,
    /// The number of times that each name was requested.
    names: HashMap<String, usize>,
    /// The prefix of node names: the module that the nodes compute.
    scope: String,
}

/// The value of an attribute.
#[derive(Debug, Clone)]
pub(crate) enum Attribute {
    Int(i64),
    Float(f32),
    Text(&'static str),
    Ints(Vec<i64>),
}

impl Graph {
    pub(crate) fn new(opset: i64, float: Element) -> Graph {
        Graph {
            opset,
            float,
            nodes: Vec::new(),
            initializers: Vec::new(),
            constants: HashMap::new(),
            quantized: HashMap::new(),
            names: HashMap::new(),
            scope: String::new(),
        }
    }

    /// Sets the module whose name is the prefix of the next nodes.
    pub(crate) fn enter(&mut self, scope: &str) {
        scope.clone_into(&mut self.scope);
    }

    /// Adds a call of an operator of ONNX with one result.
    pub(crate) fn op(
        &mut self,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
    ) -> Value {
        let [value] = self.ops("", op, inputs, attributes);
        value
    }

    /// Adds a call of an operator of `domain` with `N` results.
    pub(crate) fn ops<const N: usize>(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
    ) -> [Value; N] {
        let name = self.unique(op);
        let outputs = std::array::from_fn(|at| format!("{name}_output_{at}"));
        self.push(domain, op, name, inputs, outputs.to_vec(), attributes);
        outputs
    }

    /// Adds a call whose results have the given names.
    pub(crate) fn named(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: &[(&str, Attribute)],
    ) {
        let name = self.unique(op);
        let outputs = outputs.iter().map(|name| (*name).to_owned()).collect();
        self.push(domain, op, name, inputs, outputs, attributes);
    }

    /// Renames the result of the last node.
    pub(crate) fn name_last(&mut self, name: &str) {
        if let Some(output) = self
            .nodes
            .last_mut()
            .and_then(|node| node.output.first_mut())
        {
            name.clone_into(output);
        }
    }

    fn push(
        &mut self,
        domain: &str,
        op: &str,
        name: String,
        inputs: &[&str],
        output: Vec<String>,
        attributes: &[(&str, Attribute)],
    ) {
        let attributes = attributes.iter();
        self.nodes.push(NodeProto {
            input: inputs.iter().map(|input| (*input).to_owned()).collect(),
            output,
            name: Some(name),
            op_type: Some(op.to_owned()),
            attribute: attributes
                .map(|(name, value)| value.clone().into_proto(name))
                .collect(),
            doc_string: None,
            // No domain means ONNX's own.
            domain: (!domain.is_empty()).then(|| domain.to_owned()),
        });
    }

    fn unique(&mut self, op: &str) -> String {
        let name = format!("{}/{op}", self.scope);
        let count = self.names.entry(name.clone()).or_default();
        *count += 1;
        // The first name has no number, as in the names of PyTorch's exporter.
        match *count {
            1 => name,
            more => format!("{name}_{}", more - 1),
        }
    }

    /// Adds a weight that is converted when it is written, unless a weight of that name exists.
    pub(crate) fn weight(
        &mut self,
        name: impl Into<String>,
        shape: &[i64],
        element: Element,
        make: impl Fn() -> Result<Tensor> + 'static,
    ) -> Value {
        let name = name.into();
        // The embedding and the head both request a tied table.
        if !self.initializers.iter().any(|own| own.name == name) {
            self.initializers.push(Initializer {
                name: name.clone(),
                shape: shape.to_vec(),
                element,
                data: Data::Made(Box::new(make)),
            });
        }
        name
    }

    /// Adds a small constant, or returns an equal one.
    fn constant(&mut self, what: &str, shape: &[i64], element: Element, bytes: Vec<u8>) -> Value {
        // The key has dtype and shape: a scalar and a vector of one element are not interchangeable.
        let key = format!("{element:?}{shape:?}{bytes:?}");
        if let Some(name) = self.constants.get(&key) {
            return name.clone();
        }
        let name = format!("constants/{what}_{}", self.constants.len());
        self.constants.insert(key, name.clone());
        self.initializers.push(Initializer {
            name: name.clone(),
            shape: shape.to_vec(),
            element,
            data: Data::Bytes(bytes),
        });
        name
    }

    /// Adds a list of integers: a shape or axes.
    pub(crate) fn ints(&mut self, numbers: &[i64]) -> Value {
        let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.constant("ints", &[numbers.len() as i64], Element::I64, bytes)
    }

    /// Adds a scalar integer.
    pub(crate) fn int(&mut self, number: i64) -> Value {
        self.constant("int", &[], Element::I64, number.to_le_bytes().to_vec())
    }

    /// Adds bytes.
    pub(crate) fn bytes(&mut self, numbers: &[u8], shape: &[i64]) -> Value {
        self.constant("bytes", shape, Element::U8, numbers.to_vec())
    }

    /// Adds a scalar in fp32.
    pub(crate) fn f32(&mut self, number: f32) -> Value {
        self.constant("float", &[], Element::F32, number.to_le_bytes().to_vec())
    }

    /// Adds a vector in fp32.
    pub(crate) fn f32s(&mut self, numbers: &[f32]) -> Value {
        let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.constant("floats", &[numbers.len() as i64], Element::F32, bytes)
    }

    /// Adds a scalar in the dtype of activations.
    pub(crate) fn number(&mut self, number: f64) -> Result<Value> {
        if self.float == Element::F32 {
            return Ok(self.f32(number as f32));
        }
        // libtorch rounds to f16, which Rust does not have.
        let half = Tensor::f_from_slice(&[number])?.f_to_kind(self.float.kind())?;
        let mut bytes = vec![0; half.kind().elt_size_in_bytes()];
        half.f_copy_data_u8(&mut bytes, 1)?;
        Ok(self.constant("number", &[], self.float, bytes))
    }

    pub(crate) fn cast(&mut self, value: &str, to: i32) -> Value {
        self.op("Cast", &[value], &[("to", Attribute::Int(i64::from(to)))])
    }

    /// Casts a value in the dtype of activations to fp32, if they are not fp32.
    pub(crate) fn widened(&mut self, value: &str) -> Value {
        match self.float {
            Element::F32 => value.to_owned(),
            _ => self.cast(value, data_type::FLOAT),
        }
    }

    /// Casts a value in fp32 to the dtype of activations.
    pub(crate) fn narrowed(&mut self, value: &str) -> Value {
        match self.float {
            Element::F32 => value.to_owned(),
            float => self.cast(value, float.data_type()),
        }
    }

    pub(crate) fn reshape(&mut self, value: &str, shape: &[i64]) -> Value {
        let shape = self.ints(shape);
        self.op("Reshape", &[value, &shape], &[])
    }

    pub(crate) fn transpose(&mut self, value: &str, order: &[i64]) -> Value {
        let order = Attribute::Ints(order.to_vec());
        self.op("Transpose", &[value], &[("perm", order)])
    }

    pub(crate) fn unsqueeze(&mut self, value: &str, axes: &[i64]) -> Value {
        let axes = self.ints(axes);
        self.op("Unsqueeze", &[value, &axes], &[])
    }

    /// Reads one dimension of a value, as a vector of one element.
    pub(crate) fn dimension(&mut self, value: &str, axis: i64) -> Value {
        let (start, end) = (Attribute::Int(axis), Attribute::Int(axis + 1));
        self.op("Shape", &[value], &[("start", start), ("end", end)])
    }

    pub(crate) fn concat(&mut self, values: &[&str], axis: i64) -> Value {
        self.op("Concat", values, &[("axis", Attribute::Int(axis))])
    }
}

impl Attribute {
    fn into_proto(self, name: &str) -> AttributeProto {
        let mut proto = AttributeProto {
            name: Some(name.to_owned()),
            ..AttributeProto::default()
        };
        proto.r#type = Some(match self {
            Attribute::Int(i) => {
                proto.i = Some(i);
                attribute_type::INT
            }
            Attribute::Float(f) => {
                proto.f = Some(f);
                attribute_type::FLOAT
            }
            Attribute::Text(text) => {
                proto.s = Some(text.as_bytes().to_vec());
                attribute_type::STRING
            }
            Attribute::Ints(ints) => {
                proto.ints = ints;
                attribute_type::INTS
            }
        });
        proto
    }
}
