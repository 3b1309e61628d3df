//! Jinja templates with Python's semantics: a chat template renders here to the same text as with jinja2.
//!
//! Chat templates are written for jinja2, and much of what they rely on is Python rather than Jinja: how values print,
//! how slices, `%` and string methods work, what counts as a sequence, how comparisons chain. A [`Template`] has the
//! values, operators and methods of Python, and the Jinja environment of transformers' `apply_chat_template`:
//! `trim_blocks` and `lstrip_blocks`, the sandbox, `break` and `continue`, the tag `generation`, the functions
//! `raise_exception` and `strftime_now`, and a filter `tojson` with the output of `json.dumps`. Templates that jinja2
//! refuses are refused.
//!
//! ```
//! use overdrive_jinja::Template;
//!
//! let template = Template::parse(
//!     "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}{{ messages[0] }}",
//! )?;
//! let variables = serde_json::json!({"messages": [{"role": "user", "content": " Hi ", "name": null}]});
//! let text = template.render(variables.as_object().unwrap())?;
//! assert_eq!(text, "<|user|>Hi\n{'role': 'user', 'content': ' Hi ', 'name': None}");
//! # Ok::<(), overdrive_jinja::Error>(())
//! ```
//!
//! # Limits
//!
//! A chat template is a program that comes with a model, so it may be wrong or hostile. Beyond these limits, parsing or
//! rendering returns an error:
//!
//! | item | limit |
//! |---|---|
//! | source | 256 KiB, and 100 levels of nested tags and expressions |
//! | steps per rendering | 10 million: statements, operations, iterated elements, blocks of 256 bytes of text that an operation reads |
//! | recursion through macros and recursive loops | 1000 levels of statements and expressions |
//! | output of a rendering | 64 MiB |
//! | values | 100 levels of nesting; 2²⁴ elements and blocks of 64 bytes of text, counted over all values that a rendering creates |
//! | integers | 128 bits |
//! | `range` | 100,000 numbers, as in jinja2's sandbox |
//! | parameters of a macro, named arguments of a call, attributes of a namespace | 1000 |
//! | width or precision of a format | 65,536 |
//!
//! Parsing and rendering run on a separate thread, whose stack is large enough for these limits, so that no template
//! can overflow it.
//!
//! # Not supported
//!
//! The following are refused with an error that names them: the filters `random` and `urlize`, `pprint` of a value that
//! does not fit in a line of 80 characters, the tag `autoescape`, `include`, `import` and `extends` (there are no other
//! templates), `str.encode`, escapes by name (`"\N{…}"`), and complex numbers.
//!
//! `striptags` decodes numeric entities and `amp`, `lt`, `gt`, `quot`, `apos` and `nbsp`; other entities are left
//! unchanged. Ten characters differ in case from Python 3.11, which has an earlier version of Unicode.
#![deny(missing_docs)]

mod args;
mod ast;
mod error;
mod filters;
mod format_spec;
mod globals;
mod json;
mod large_stack;
mod lexer;
mod limits;
mod markup;
mod methods;
mod number;
mod objects;
mod operators;
mod parser;
mod percent;
mod predicates;
mod runtime;
mod string_methods;
mod template;
mod unicode;
mod value;
mod wrap;

pub use error::{Error, Result};
pub use template::Template;
