//! Jinja templates with Python's values: what a chat template renders here is what jinja2 renders.
//!
//! Chat templates are written for jinja2, and much of what they rely on is not Jinja but Python: how values print, what
//! slices, `%` and methods of strings do, what counts as a sequence, how comparisons chain. A [`Template`] has the values,
//! operators and methods of Python, and Jinja as transformers' `apply_chat_template` sets it up: `trim_blocks` and
//! `lstrip_blocks`, the sandbox, `break` and `continue`, the tag `generation`, the functions `raise_exception` and
//! `strftime_now`, and a filter `tojson` that writes what `json.dumps` writes. What jinja2 refuses is refused.
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
//! A chat template is a program that comes with a model, so it may be wrong or hostile. Beyond these limits parsing or
//! rendering returns an error:
//!
//! | of | limit |
//! |---|---|
//! | the source | 256 KiB, and 100 levels of nested tags and expressions |
//! | the steps of one rendering | 10 million: statements, operations, iterated elements, blocks of 256 bytes of text that an operation reads |
//! | recursion, through macros and recursive loops | 1000 levels of statements and expressions |
//! | the text of one rendering | 64 MiB |
//! | values | 100 levels of nesting; 2²⁴ elements and blocks of 64 bytes of text, counted over all values that a rendering makes |
//! | integers | 128 bits |
//! | `range` | 100,000 numbers, as in jinja2's sandbox |
//! | parameters of a macro, named arguments of a call, attributes of a namespace | 1000 |
//! | a width or precision of a format | 65,536 |
//!
//! Parsing and rendering run on a thread of their own, whose stack suffices for these limits: no template can overflow it.
//!
//! # Not supported
//!
//! These are refused by an error that names them: the filters `random` and `urlize`, `pprint` of a value that does not fit
//! a line of 80 characters, the tag `autoescape`, `include`, `import` and `extends` (there are no other templates),
//! `str.encode`, escapes by name (`"\N{…}"`), and complex numbers.
//!
//! `striptags` decodes numeric entities and `amp`, `lt`, `gt`, `quot`, `apos` and `nbsp`; others stay as they are. Ten characters
//! have another case than in Python 3.11, which has an earlier version of Unicode.
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
