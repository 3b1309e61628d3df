//! Python's pickle machine, with the opcodes that weight files need.
//!
//! Values are indices into one list, so deeply nested values need no recursion. Each opcode makes at most one value, so
//! memory is bounded by the length of the pickle.

use std::collections::HashMap;

use crate::error::{Checked, Fault, bad};
use crate::globals::{Global, global};
use crate::reader::Reader;
use crate::tensor::{MAX_RANK, StorageRef, TensorRef, rebuild, storage};

/// The index of a value.
pub(crate) type Id = usize;

/// A value of a pickle.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i128),
    Float,
    Text(String),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    // Boxed, because an opcode of one byte makes a value.
    Storage(Box<StorageRef>),
    Tensor(Box<TensorRef>),
    /// A value that is not read: a device, a set, a quantized tensor.
    Unread,
}

/// The values of a pickle, and the last one, which is its result.
#[derive(Debug)]
pub(crate) struct Values {
    all: Vec<Value>,
    pub(crate) result: Id,
}

impl Values {
    pub(crate) fn get(&self, id: Id) -> &Value {
        &self.all[id]
    }

    /// Returns all storages.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &StorageRef> {
        self.all.iter().filter_map(|value| match value {
            Value::Storage(storage) => Some(storage.as_ref()),
            _ => None,
        })
    }
}

/// The values without contents, each of which exists once.
const SHARED: [Value; 5] = [
    Value::None,
    Value::Bool(false),
    Value::Bool(true),
    Value::Float,
    Value::Unread,
];

#[derive(Debug)]
pub(crate) struct Machine {
    values: Vec<Value>,
    stack: Vec<Id>,
    /// The length of the stack at each mark.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl Machine {
    /// Runs a pickle up to its STOP.
    pub(crate) fn run(reader: &mut Reader<'_>) -> Checked<Values> {
        let mut machine = Machine {
            values: SHARED.to_vec(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        loop {
            let opcode = reader.byte()?;
            if opcode == b'.' {
                let result = machine.pop()?;
                return Ok(Values {
                    all: machine.values,
                    result,
                });
            }
            machine.step(opcode, reader)?;
        }
    }

    pub(crate) fn value(&self, id: Id) -> &Value {
        &self.values[id]
    }

    fn step(&mut self, opcode: u8, reader: &mut Reader<'_>) -> Checked<()> {
        match opcode {
            // PROTO: the version is irrelevant, since only the opcodes below are supported.
            0x80 => drop(reader.byte()?),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            // BININT, BININT1, BININT2, LONG1
            b'J' => self.push_int(i32::from_le_bytes(reader.array()?)),
            b'K' => self.push_int(reader.byte()?),
            b'M' => self.push_int(u16::from_le_bytes(reader.array()?)),
            0x8a => {
                let value = long(reader)?;
                self.push(value);
            }
            // BINFLOAT
            b'G' => {
                reader.take(8)?;
                self.push(Value::Float);
            }
            // BINUNICODE, SHORT_BINSTRING, BINSTRING
            b'X' | b'T' => {
                let length = reader.u32()? as usize;
                self.push(Value::Text(reader.text(length)?.to_owned()));
            }
            b'U' => {
                let length = reader.byte()?.into();
                self.push(Value::Text(reader.text(length)?.to_owned()));
            }
            // MARK and the tuples
            b'(' => self.marks.push(self.stack.len()),
            b't' => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items));
            }
            b')' => self.push(Value::Tuple(Vec::new())),
            0x85..=0x87 => {
                let start = self.stack.len().checked_sub(usize::from(opcode - 0x84));
                let start = start.ok_or_else(empty)?;
                let items = self.stack.split_off(start);
                self.push(Value::Tuple(items));
            }
            b']' => self.push(Value::List(Vec::new())),
            b'}' => self.push(Value::Dict(Vec::new())),
            // APPEND, APPENDS, SETITEM, SETITEMS
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            // BINGET, LONG_BINGET, BINPUT, LONG_BINPUT
            b'h' => self.recall(reader.byte()?.into())?,
            b'j' => self.recall(reader.u32()?)?,
            b'q' => self.remember(reader.byte()?.into())?,
            b'r' => self.remember(reader.u32()?)?,
            // GLOBAL
            b'c' => {
                let (module, name) = (reader.line()?, reader.line()?);
                let found = global(module, name);
                let found = found.ok_or_else(|| Fault::Refused(format!("{module}.{name}")))?;
                self.push(Value::Global(found));
            }
            // BINPERSID
            b'Q' => {
                let description = self.pop()?;
                let storage = storage(self, description)?;
                self.push(Value::Storage(Box::new(storage)));
            }
            // REDUCE and BUILD
            b'R' => {
                let (arguments, function) = (self.pop()?, self.pop()?);
                let value = self.call(function, arguments)?;
                self.push(value);
            }
            b'b' => {
                // Attributes of a dictionary, such as `_metadata` with the versions of modules.
                self.pop()?;
                let target = self.pop()?;
                if !matches!(self.value(target), Value::Dict(_) | Value::Unread) {
                    return bad("it sets attributes of something other than a dictionary");
                }
                self.stack.push(target);
            }
            other => {
                return bad(format!(
                    "it has the opcode {other:#04x} at byte {}, which weights do not need",
                    reader.position() - 1
                ));
            }
        }
        Ok(())
    }

    /// Calls a function that a file may name.
    fn call(&self, function: Id, arguments: Id) -> Checked<Value> {
        let (Value::Global(function), Value::Tuple(arguments)) =
            (self.value(function), self.value(arguments))
        else {
            return bad("it calls something other than a function with arguments");
        };
        match function {
            Global::OrderedDict if arguments.is_empty() => Ok(Value::Dict(Vec::new())),
            Global::Size => match arguments.first().map(|&id| self.value(id)) {
                // Repeated copies of a long tuple would fill memory.
                Some(Value::Tuple(sizes)) if sizes.len() > MAX_RANK => {
                    bad(format!("it makes a shape of {} dimensions", sizes.len()))
                }
                Some(Value::Tuple(sizes)) if arguments.len() == 1 => {
                    Ok(Value::Tuple(sizes.clone()))
                }
                _ => bad("it makes a shape of something other than a tuple"),
            },
            Global::Parameter => match arguments.first().map(|&id| self.value(id)) {
                Some(tensor @ (Value::Tensor(_) | Value::Unread)) => Ok(tensor.clone()),
                _ => bad("it makes a parameter of something other than a tensor"),
            },
            Global::Tensor => rebuild(self, arguments, false),
            Global::TypedTensor => rebuild(self, arguments, true),
            // A function, a class, the arguments of the function, and attributes.
            Global::FromType => match arguments
                .iter()
                .take(5)
                .map(|&id| self.value(id))
                .collect::<Vec<_>>()[..]
            {
                [
                    Value::Global(function @ (Global::Tensor | Global::TypedTensor)),
                    Value::Global(Global::TensorClass),
                    Value::Tuple(arguments),
                    _,
                ] => rebuild(self, arguments, *function == Global::TypedTensor),
                _ => Ok(Value::Unread),
            },
            Global::Unread => Ok(Value::Unread),
            Global::OrderedDict | Global::TensorClass | Global::Storage(_) | Global::Dtype(_) => {
                bad(format!(
                    "it calls {function:?} with {} arguments",
                    arguments.len()
                ))
            }
        }
    }

    fn push(&mut self, value: Value) {
        let shared = match value {
            Value::None => Some(0),
            Value::Bool(value) => Some(1 + usize::from(value)),
            Value::Float => Some(3),
            Value::Unread => Some(4),
            _ => None,
        };
        let id = shared.unwrap_or(self.values.len());
        if id == self.values.len() {
            self.values.push(value);
        }
        self.stack.push(id);
    }

    fn push_int(&mut self, value: impl Into<i128>) {
        self.push(Value::Int(value.into()));
    }

    /// Takes the last value of the stack. Values below a mark belong to the enclosing value.
    fn pop(&mut self) -> Checked<Id> {
        if self.stack.len() <= self.marks.last().copied().unwrap_or(0) {
            return Err(empty());
        }
        self.stack.pop().ok_or_else(empty)
    }

    fn pop_mark(&mut self) -> Checked<Vec<Id>> {
        let start = self.marks.pop().filter(|&start| start <= self.stack.len());
        Ok(self.stack.split_off(start.ok_or_else(empty)?))
    }

    fn append(&mut self, items: Vec<Id>) -> Checked<()> {
        let list = *self.stack.last().ok_or_else(empty)?;
        match &mut self.values[list] {
            Value::List(list) => list.extend(items),
            _ => return bad("it appends to something other than a list"),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Checked<()> {
        let dict = *self.stack.last().ok_or_else(empty)?;
        let (pairs, rest) = items.as_chunks::<2>();
        match &mut self.values[dict] {
            Value::Dict(dict) if rest.is_empty() => {
                dict.extend(pairs.iter().map(|&[key, value]| (key, value)));
            }
            _ => return bad("it sets items of something other than a dictionary"),
        }
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Checked<()> {
        let Some(&id) = self.memo.get(&index) else {
            return bad(format!("it recalls value {index}, which it did not store"));
        };
        self.stack.push(id);
        Ok(())
    }

    fn remember(&mut self, index: u32) -> Checked<()> {
        let id = *self.stack.last().ok_or_else(empty)?;
        self.memo.insert(index, id);
        Ok(())
    }
}

fn empty() -> Fault {
    Fault::Bad("it takes a value from an empty stack".to_owned())
}

/// Reads an integer, little-endian in two's complement; one of more than 16 bytes is not read.
fn long(reader: &mut Reader<'_>) -> Checked<Value> {
    let length = usize::from(reader.byte()?);
    let bytes = reader.take(length)?;
    let mut wide = match bytes.last() {
        Some(byte) if byte & 0x80 != 0 => [0xff; 16],
        _ => [0; 16],
    };
    let Some(low) = wide.get_mut(..length) else {
        return Ok(Value::Unread);
    };
    low.copy_from_slice(bytes);
    Ok(Value::Int(i128::from_le_bytes(wide)))
}
