use std::fmt;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use overdrive_generation::{Constraint, Error, Result, TokenMask};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::formats::remove_annotations;
use crate::recursion::endless_reference;
use crate::token_bytes::token_bytes;

/// The tokens of a tokenizer as a trie of bytes, built once for all grammars.
#[derive(Clone)]
pub struct GrammarVocabulary {
    factory: Arc<ParserFactory>,
    end_of_text: Arc<[i64]>,
}

impl fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarVocabulary")
            .field("end_of_text", &self.end_of_text)
            .finish_non_exhaustive()
    }
}

impl GrammarVocabulary {
    /// Builds the trie of the tokens `0..vocabulary` of `tokenizer`, where `vocabulary` is the size of the
    /// model's vocabulary (ids beyond the tokenizer's are never allowed). `end_of_text` has at least one
    /// token; these tokens may end a complete text.
    ///
    /// # Errors
    /// [`Error::Constraint`] if the tokenizer's tokens have no bytes, or if `end_of_text` is empty or
    /// outside the vocabulary.
    pub fn new(
        tokenizer: &Tokenizer,
        vocabulary: usize,
        end_of_text: &[i64],
    ) -> Result<GrammarVocabulary> {
        let ends: Vec<u32> = end_of_text
            .iter()
            .filter_map(|&id| u32::try_from(id).ok())
            .filter(|&id| (id as usize) < vocabulary)
            .collect();
        if ends.is_empty() || ends.len() != end_of_text.len() {
            return Err(Error::Constraint(format!(
                "the end-of-text tokens are {end_of_text:?}: a grammar needs at least one, in \
                 0..{vocabulary}"
            )));
        }
        let words: Vec<Vec<u8>> = token_bytes(tokenizer, vocabulary)?
            .into_iter()
            .enumerate()
            .map(|(id, bytes)| match bytes {
                Some(bytes) if !ends.contains(&(id as u32)) => bytes,
                // llguidance reads the marker byte, which no UTF-8 text has, as the beginning of a
                // special token's name.
                _ => special(id),
            })
            .collect();
        let size = u32::try_from(words.len()).map_err(|e| Error::Constraint(e.to_string()))?;
        // `TokRxInfo` names one end-of-text token; `with_eos_tokens` names all of them.
        let trie = TokTrie::from(&TokRxInfo::new(size, ends[0]), &words).with_eos_tokens(&ends);
        let environment: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(constraint)?;
        // The factory's default writes warnings to stderr.
        factory.quiet();
        Ok(GrammarVocabulary {
            factory: Arc::new(factory),
            end_of_text: end_of_text.into(),
        })
    }
}

fn special(id: usize) -> Vec<u8> {
    let mut name = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    name.extend(format!("[{id}]").into_bytes());
    name
}

/// Returns the error of llguidance without the state of its parser, which follows the message.
fn constraint(error: impl fmt::Display) -> Error {
    let error = error.to_string();
    let message = error.split("\n<state>").next().unwrap_or_default();
    Error::Constraint(match message {
        "NoExtensionBias" => "no token continues the text as the grammar requires: the tokenizer lacks a character that is \
                              required, or it is an end-of-text token"
            .to_owned(),
        message => message.to_owned(),
    })
}

/// A constraint that makes the continuation match a regular expression or a JSON schema, by `llguidance`
/// (vLLM's `regex` and `json`).
pub struct GrammarConstraint {
    matcher: Matcher,
    end_of_text: Arc<[i64]>,
    ended: bool,
}

impl fmt::Debug for GrammarConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarConstraint")
            .field("finished", &self.is_finished())
            .finish_non_exhaustive()
    }
}

impl GrammarConstraint {
    /// Builds a constraint that makes the whole text match `pattern`, in the syntax of the `regex` crate,
    /// without look-around.
    ///
    /// # Errors
    /// [`Error::Constraint`] if the pattern is invalid or too large.
    pub fn regex(vocabulary: &GrammarVocabulary, pattern: &str) -> Result<GrammarConstraint> {
        let grammar = TopLevelGrammar::from_regex(pattern);
        GrammarConstraint::new(vocabulary, grammar).map_err(|error| match &error {
            // What is wrong is in a line of its own, between places in the grammar around the pattern.
            Error::Constraint(message) => match message
                .lines()
                .find_map(|line| line.strip_prefix("error: "))
            {
                Some(why) => {
                    Error::Constraint(format!("`{pattern}` is not a regular expression: {why}"))
                }
                None => error,
            },
            _ => error,
        })
    }

    /// Builds a constraint that makes the whole text JSON that conforms to `schema`. Spaces after separators are
    /// optional. A `format` that is none of JSON Schema's restricts nothing. A `oneOf` whose alternatives may
    /// overlap is read as `anyOf`.
    ///
    /// # Errors
    /// [`Error::Constraint`] if the schema is invalid, uses an unsupported keyword, or is infinitely recursive.
    pub fn json_schema(
        vocabulary: &GrammarVocabulary,
        schema: &Value,
    ) -> Result<GrammarConstraint> {
        if let Some(reference) = endless_reference(schema) {
            return Err(Error::Constraint(format!(
                "the JSON schema is infinitely recursive through {reference:?}, so no text fits it; give the reference \
                 an alternative in `anyOf`, or remove its property from `required`"
            )));
        }
        let mut schema = schema.clone();
        remove_annotations(&mut schema);
        if let Value::Object(fields) = &mut schema {
            // Without it, overlapping alternatives of `oneOf` are an error.
            let options = json!({"coerce_one_of": true});
            fields.entry("x-guidance").or_insert(options);
        }
        let grammar = TopLevelGrammar::from_json_schema(schema);
        GrammarConstraint::new(vocabulary, grammar)
    }

    fn new(vocabulary: &GrammarVocabulary, grammar: TopLevelGrammar) -> Result<GrammarConstraint> {
        let parser = vocabulary.factory.create_parser(grammar);
        let matcher = Matcher::new(Ok(parser.map_err(constraint)?));
        if let Some(error) = matcher.get_error() {
            return Err(constraint(error));
        }
        Ok(GrammarConstraint {
            matcher,
            end_of_text: Arc::clone(&vocabulary.end_of_text),
            ended: false,
        })
    }
}

impl Constraint for GrammarConstraint {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<()> {
        if !self.is_finished() {
            let found = self.matcher.compute_mask().map_err(constraint)?;
            mask.allow_words(found.as_slice());
        }
        Ok(())
    }

    fn advance(&mut self, token: i64) -> Result<()> {
        if self.end_of_text.contains(&token) {
            if !self.matcher.is_accepting().map_err(constraint)? {
                let why = format!("token {token} ends a text that is not complete");
                return Err(Error::Constraint(why));
            }
            self.ended = true;
            return Ok(());
        }
        let id = u32::try_from(token).map_err(constraint)?;
        self.matcher.consume_token(id).map_err(constraint)
    }

    fn is_finished(&self) -> bool {
        self.ended || self.matcher.is_stopped()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(GrammarConstraint {
            // A plain clone would share the lexer's caches and contend for their lock.
            matcher: self.matcher.deep_clone(),
            end_of_text: Arc::clone(&self.end_of_text),
            ended: self.ended,
        })
    }
}
