//! Rendering: the evaluation of a template's statements and expressions.

mod calls;
mod expressions;
mod scope;
mod statements;

pub(crate) use scope::Scope;

use std::rc::Rc;

use crate::ast::{Name, Statement};
use crate::error::{Error, Result};
use crate::limits::{MAX_ELEMENTS, MAX_LEVELS, MAX_OUTPUT_BYTES, MAX_STEPS, too_long};
use crate::value::{Value, too_many_elements};
use statements::Flow;

/// The state of one rendering.
pub(crate) struct Runtime {
    steps: u64,
    elements: usize,
    level: usize,
    /// The output, and within it the outputs that are being captured; statements write to the last one.
    buffers: Vec<String>,
    buffered: usize,
    root: Rc<Scope>,
    /// The characters to write before and after the text of a `generation` tag.
    marks: Option<(char, char)>,
    /// The scopes of macros. A scope holds its macros and they hold the scope, so these cycles are broken at the end.
    kept: Vec<Rc<Scope>>,
}

/// Renders statements with the variables of a JSON object.
pub(crate) fn render(
    body: &[Statement],
    variables: &serde_json::Map<String, serde_json::Value>,
    marks: Option<(char, char)>,
) -> Result<String> {
    let root = Rc::new(Scope::default());
    for (name, value) in variables {
        root.set(&Name::from(name.as_str()), Value::from_json(value, 0)?);
    }
    // The template's own variables are in a scope within that of the given ones; a `block` sees both.
    let root = Scope::within(&root);
    let mut runtime = Runtime {
        steps: 0,
        elements: 0,
        level: 0,
        buffers: vec![String::new()],
        buffered: 0,
        root: root.clone(),
        marks,
        kept: Vec::new(),
    };
    let result = runtime.run(body, &root);
    // Without its variables a scope no longer holds macros, which hold the scope: both are freed.
    for scope in runtime.kept.drain(..) {
        scope.variables.take();
    }
    result?;
    Ok(runtime.buffers.pop().unwrap_or_default())
}

impl Runtime {
    /// Counts a step.
    pub(crate) fn step(&mut self) -> Result<()> {
        self.steps += 1;
        match self.steps > MAX_STEPS {
            false => Ok(()),
            true => Err(Error::limit(
                "it exceeds the step limit of one rendering; it probably loops forever",
            )),
        }
    }

    /// Counts the steps of an operation that reads a whole value: one for four elements or 256 bytes of text.
    pub(crate) fn read(&mut self, value: &Value) {
        self.steps += value.shape().weight as u64 / 4;
    }

    /// Counts the steps of an operation that reads a value if it is a string.
    pub(crate) fn read_text(&mut self, value: &Value) {
        if matches!(value, Value::Str(_)) {
            self.read(value);
        }
    }

    /// Counts the steps of an operation that computes the hash of a key, or compares it.
    pub(crate) fn read_key(&mut self, key: &Value) {
        if matches!(key, Value::Str(_) | Value::Tuple(_)) {
            self.read(key);
        }
    }

    /// Counts elements of a value before it is made.
    pub(crate) fn reserve(&mut self, elements: usize) -> Result<()> {
        self.elements = self.elements.saturating_add(elements);
        match self.elements > MAX_ELEMENTS {
            false => Ok(()),
            true => Err(too_many_elements()),
        }
    }

    /// Checks the length of a string before it is made, and counts it.
    pub(crate) fn reserve_text(&mut self, bytes: usize) -> Result<()> {
        self.check_text(bytes)?;
        self.reserve(bytes / 64)
    }

    /// Returns an error if a text has more than the most bytes of one rendering.
    pub(crate) fn check_text(&self, bytes: usize) -> Result<()> {
        match bytes > MAX_OUTPUT_BYTES {
            false => Ok(()),
            true => Err(too_long()),
        }
    }

    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.level >= MAX_LEVELS {
            return Err(Error::limit(format!(
                "its recursion is deeper than {MAX_LEVELS} levels, the limit of one rendering"
            )));
        }
        self.level += 1;
        let result = work(self);
        self.level -= 1;
        result
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.buffered += text.len();
        self.steps += text.len() as u64 / 64;
        self.check_text(self.buffered)?;
        if let Some(buffer) = self.buffers.last_mut() {
            buffer.push_str(text);
        }
        Ok(())
    }

    /// Runs statements; returns their output and how they ended.
    fn captured(&mut self, body: &[Statement], scope: &Rc<Scope>) -> Result<(String, Flow)> {
        self.capture(|runtime| runtime.run(body, scope))
    }

    fn capture<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<(String, T)> {
        self.buffers.push(String::new());
        let result = work(self);
        let text = self.buffers.pop().unwrap_or_default();
        self.buffered -= text.len();
        Ok((text, result?))
    }
}
