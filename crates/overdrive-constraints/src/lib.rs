//! Regular expressions and JSON schemas as constraints on generated text, implemented with `llguidance`.
//!
//! This is a separate crate, so that programs without grammars do not compile the parser:
//! `overdrive-generation` has the trait [`Constraint`](overdrive_generation::Constraint) and the constraint to a
//! list of given texts.
//!
//! ```
//! use overdrive_constraints::{GrammarConstraint, GrammarVocabulary};
//! use overdrive_generation::Tokenizer;
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! # let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
//! #   "pre_tokenizer":null,"post_processor":null,"decoder":null,
//! #   "model":{"type":"WordLevel","vocab":{"a":0,"b":1,"<eos>":2},"unk_token":"<eos>"}}"#;
//! let tokenizer: Tokenizer = json.parse()?;
//! let vocabulary = GrammarVocabulary::new(&tokenizer, 3, &[2])?;
//! let constraint = GrammarConstraint::regex(&vocabulary, "a+b")?;
//! // `GenerateOptions::constraints` takes one for each prompt.
//! # drop(constraint);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod formats;
mod grammar;
mod recursion;
mod token_bytes;

pub use grammar::{GrammarConstraint, GrammarVocabulary};
pub use token_bytes::token_bytes;
