//! Attention over a cache, by each of the three sets of operators.

use overdrive_transformer::ModelConfig;

use crate::graph::{Attribute, Graph, MICROSOFT, Value};
use crate::initializer::Element;
use crate::layers::bounded;
use crate::proto::data_type;
use crate::{Attention, Error, ExportOptions, Result};

/// The numbers of heads of a layer, and the head size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) queries: i64,
    pub(crate) keys: i64,
    pub(crate) dim: i64,
}

impl Heads {
    pub(crate) fn of(config: &ModelConfig) -> Heads {
        Heads {
            queries: config.num_attention_heads(),
            keys: config.num_key_value_heads(),
            dim: config.head_dim(),
        }
    }
}

/// The attention of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer {
    pub(crate) number: usize,
    pub(crate) heads: Heads,
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) window: Option<i64>,
}

/// The values that all layers share: masks, lengths and shapes.
#[derive(Debug)]
pub(crate) struct Context {
    form: Attention,
    use_cache: bool,
    /// The mask `(B, 1, T, S)`, or `(B, 1, 1, T, S)` for grouped queries.
    full: Option<Value>,
    /// The mask of layers with a sliding window.
    sliding: Option<Value>,
    /// The lengths for `GroupQueryAttention`: `S − 1` for each row, and `S`.
    lengths: Option<(Value, Value)>,
    /// The shapes of scores with separate and with joined groups.
    grouped_shape: Option<(Value, Value)>,
}

/// Returns the name of the input with the keys or values of past tokens.
pub(crate) fn past_name(layer: usize, part: &str) -> String {
    format!("past_key_values.{layer}.{part}")
}

/// Returns the name of the output with the keys or values of past and new tokens.
pub(crate) fn present_name(layer: usize, part: &str) -> String {
    format!("present.{layer}.{part}")
}

impl Context {
    /// Writes the masks and lengths. `windows` has one entry for each layer.
    pub(crate) fn new(
        graph: &mut Graph,
        options: &ExportOptions,
        heads: Heads,
        windows: &[Option<i64>],
        softcap: bool,
    ) -> Result<Context> {
        let form = match options.attention {
            // ONNX's operator applies the softcap after the mask, which would bound the mask as well.
            Attention::Standard if softcap => Attention::Composed,
            form => form,
        };
        if form == Attention::GroupQuery && heads.dim % 8 != 0 {
            return Err(Error::unsupported(
                "the head size with `GroupQueryAttention`",
                format!("{} instead of a multiple of 8", heads.dim),
                "choose another `attention`",
            ));
        }
        graph.enter("/attention_mask");
        let tokens = graph.dimension("input_ids", 1);
        let (past, total) = if options.use_cache {
            let past = graph.dimension(&past_name(0, "key"), 2);
            let total = graph.op("Add", &[&past, &tokens], &[]);
            (past, total)
        } else {
            (graph.ints(&[0]), tokens.clone())
        };
        let grouped = form == Attention::Composed && heads.queries != heads.keys;
        let mut mask = |window| mask(graph, &past, &total, window, grouped);
        let full = windows.contains(&None).then(|| mask(None)).transpose()?;
        let window = windows.iter().flatten().next().copied();
        let sliding = window.map(|window| mask(Some(window))).transpose()?;
        let grouped_shape = grouped.then(|| {
            // 0 keeps the dimension of the input: the batch size is not known here.
            let rows = graph.ints(&[0, heads.keys, heads.queries / heads.keys]);
            let apart = graph.concat(&[&rows, &tokens, &total], 0);
            let rows = graph.ints(&[0, heads.keys, -1]);
            (apart, graph.concat(&[&rows, &total], 0))
        });
        let lengths = (form == Attention::GroupQuery).then(|| lengths(graph, &total));
        Ok(Context {
            form,
            use_cache: options.use_cache,
            full,
            sliding,
            lengths,
            grouped_shape,
        })
    }

    pub(crate) fn form(&self) -> Attention {
        self.form
    }

    fn mask(&self, window: Option<i64>) -> Value {
        let mask = match window {
            Some(_) => &self.sliding,
            None => &self.full,
        };
        mask.clone().unwrap_or_default()
    }

    /// Writes attention over heads `(B, H, T, D)`, or `(B, T, H·D)` for `GroupQueryAttention`; the result is
    /// `(B, T, H·D)`.
    pub(crate) fn attend(
        &self,
        graph: &mut Graph,
        layer: Layer,
        [query, key, value]: [&str; 3],
    ) -> Result<Value> {
        match self.form {
            Attention::Composed => self.composed(graph, layer, [query, key, value]),
            Attention::Standard => Ok(self.standard(graph, layer, [query, key, value])),
            Attention::GroupQuery => Ok(self.group_query(graph, layer, [query, key, value])),
        }
    }

    /// Appends new keys or values to those of the cache.
    fn extended(&self, graph: &mut Graph, layer: usize, part: &str, new: &str) -> Value {
        // Without a cache the new tokens are the whole sequence.
        if !self.use_cache {
            return new.to_owned();
        }
        // A value with the name of an output is that output, so no node copies the cache.
        let (past, present) = (past_name(layer, part), present_name(layer, part));
        let axis = [("axis", Attribute::Int(2))];
        graph.named("", "Concat", &[&past, new], &[&present], &axis);
        present
    }

    fn composed(
        &self,
        graph: &mut Graph,
        layer: Layer,
        [query, key, value]: [&str; 3],
    ) -> Result<Value> {
        let Heads { queries, keys, dim } = layer.heads;
        let key = self.extended(graph, layer.number, "key", key);
        let value = self.extended(graph, layer.number, "value", value);
        // Scales the queries instead of the scores, which have more elements.
        let scale = graph.number(layer.scale)?;
        let mut query = graph.op("Mul", &[query, &scale], &[]);
        if self.grouped_shape.is_some() {
            // The queries of a group become rows of one matmul, so keys need not be repeated.
            query = graph.reshape(&query, &[0, keys, -1, dim]);
        }
        // Transposes after the concatenation, since caches hold keys as `(B, H, S, D)`.
        let key = graph.transpose(&key, &[0, 1, 3, 2]);
        let mut scores = graph.op("MatMul", &[&query, &key], &[]);
        if let Some(cap) = layer.softcap {
            scores = bounded(graph, &scores, cap)?;
        }
        if let Some((apart, _)) = &self.grouped_shape {
            scores = graph.op("Reshape", &[&scores, apart], &[]);
        }
        let mask = self.mask(layer.window);
        let scores = graph.op("Add", &[&scores, &mask], &[]);
        // In fp16, the softmax of a long row would not sum to one.
        let scores = graph.widened(&scores);
        let axis = [("axis", Attribute::Int(-1))];
        let weights = graph.op("Softmax", &[&scores], &axis);
        let mut weights = graph.narrowed(&weights);
        if let Some((_, together)) = &self.grouped_shape {
            weights = graph.op("Reshape", &[&weights, together], &[]);
        }
        let mut mixed = graph.op("MatMul", &[&weights, &value], &[]);
        if self.grouped_shape.is_some() {
            mixed = graph.reshape(&mixed, &[0, queries, -1, dim]);
        }
        Ok(joined(graph, &mixed, queries * dim))
    }

    fn standard(&self, graph: &mut Graph, layer: Layer, [query, key, value]: [&str; 3]) -> Value {
        let mask = self.mask(layer.window);
        let attributes = [("scale", Attribute::Float(layer.scale as f32))];
        let width = layer.heads.queries * layer.heads.dim;
        if !self.use_cache {
            let mixed = graph.op("Attention", &[query, key, value, &mask], &attributes);
            return joined(graph, &mixed, width);
        }
        let past = ["key", "value"].map(|part| past_name(layer.number, part));
        let present = ["key", "value"].map(|part| present_name(layer.number, part));
        let inputs = [query, key, value, &mask, &past[0], &past[1]];
        // Named here, as the other two results need the names of the outputs.
        let mixed = format!("/layers.{}/Attention_output_0", layer.number);
        let outputs = [mixed.as_str(), &present[0], &present[1]];
        graph.named("", "Attention", &inputs, &outputs, &attributes);
        joined(graph, &mixed, width)
    }

    fn group_query(
        &self,
        graph: &mut Graph,
        layer: Layer,
        [query, key, value]: [&str; 3],
    ) -> Value {
        let (last, total) = self.lengths.clone().unwrap_or_default();
        let mask = self.mask(layer.window);
        let past = ["key", "value"].map(|part| past_name(layer.number, part));
        let present = ["key", "value"].map(|part| present_name(layer.number, part));
        let inputs = [
            // Empty names mean absent optional inputs: the tables of cosines and sines, and positions.
            query, key, value, &past[0], &past[1], &last, &total, "", "", "", &mask,
        ];
        let mixed = format!("/layers.{}/GroupQueryAttention_output_0", layer.number);
        let outputs = [mixed.as_str(), &present[0], &present[1]];
        // The mask includes the window, so `local_window_size` is not set.
        let mut attributes = vec![
            ("num_heads", Attribute::Int(layer.heads.queries)),
            ("kv_num_heads", Attribute::Int(layer.heads.keys)),
            ("scale", Attribute::Float(layer.scale as f32)),
        ];
        if let Some(cap) = layer.softcap {
            attributes.push(("softcap", Attribute::Float(cap as f32)));
        }
        graph.named(
            MICROSOFT,
            "GroupQueryAttention",
            &inputs,
            &outputs,
            &attributes,
        );
        mixed
    }
}

/// Joins heads, `(B, H, T, D)` to `(B, T, H·D)`.
fn joined(graph: &mut Graph, heads: &str, width: i64) -> Value {
    let rows = graph.transpose(heads, &[0, 2, 1, 3]);
    graph.reshape(&rows, &[0, 0, width])
}

/// Writes the mask that is added to scores: 0 where a query attends to the key, the lowest finite number
/// elsewhere. Minus infinity would not do: padding attends to nothing, and the softmax of a row of minus infinities
/// is NaN.
fn mask(
    graph: &mut Graph,
    past: &str,
    total: &str,
    window: Option<i64>,
    grouped: bool,
) -> Result<Value> {
    let (zero, one) = (graph.int(0), graph.int(1));
    let axes = graph.ints(&[0]);
    // `Range` takes scalars.
    let past = graph.op("Squeeze", &[past, &axes], &[]);
    let end = graph.op("Squeeze", &[total, &axes], &[]);
    // Compares indices instead of `position_ids`: with padding on the left the two differ, and the cache is indexed.
    let keys = graph.op("Range", &[&zero, &end, &one], &[]);
    let queries = graph.op("Range", &[&past, &end, &one], &[]);
    let queries = graph.unsqueeze(&queries, &[1]);
    let mut visible = graph.op("LessOrEqual", &[&keys, &queries], &[]);
    if let Some(window) = window {
        let window = graph.int(window);
        let first = graph.op("Sub", &[&queries, &window], &[]);
        let inside = graph.op("Greater", &[&keys, &first], &[]);
        visible = graph.op("And", &[&visible, &inside], &[]);
    }
    let real = graph.cast("attention_mask", data_type::BOOL);
    let axes: &[i64] = if grouped { &[1, 2, 3] } else { &[1, 2] };
    let real = graph.unsqueeze(&real, axes);
    let visible = graph.op("And", &[&visible, &real], &[]);
    let least = match graph.float {
        // The lowest finite f16.
        Element::F16 => -65504.0,
        _ => f64::from(f32::MIN),
    };
    let (least, zero) = (graph.number(least)?, graph.number(0.0)?);
    Ok(graph.op("Where", &[&visible, &zero, &least], &[]))
}

/// Writes `S − 1` for each row, and `S`, both int32. All rows have the same length; padding is in the mask.
fn lengths(graph: &mut Graph, total: &str) -> (Value, Value) {
    let one = graph.ints(&[1]);
    let last = graph.op("Sub", &[total, &one], &[]);
    let batch = graph.dimension("input_ids", 0);
    let last = graph.op("Expand", &[&last, &batch], &[]);
    // `GroupQueryAttention` takes lengths as int32 only.
    let last = graph.cast(&last, data_type::INT32);
    let axes = graph.ints(&[0]);
    let total = graph.op("Squeeze", &[total, &axes], &[]);
    (last, graph.cast(&total, data_type::INT32))
}
