use std::collections::BTreeMap;
use std::sync::Arc;

use tokenizers::Tokenizer;

use super::Constraint;
use crate::prompts::encode;
use crate::{Error, Result, TokenMask};

/// A constraint that allows only one of a list of continuations (vLLM's `choice`).
///
/// The choices are token sequences in a trie. If one choice is a prefix of another, the end-of-text
/// tokens are allowed after the shorter one. A choice that is a prefix of no other ends the sequence
/// when it is complete.
#[derive(Debug, Clone)]
pub struct ChoiceConstraint {
    // Shared by the forks of a constraint, which only move their `node`.
    nodes: Arc<Vec<Node>>,
    end_of_text: Arc<[i64]>,
    /// The current node of the trie; `None` after an end of text.
    node: Option<usize>,
}

#[derive(Debug, Default)]
struct Node {
    next: BTreeMap<i64, usize>,
    ends: bool,
}

impl ChoiceConstraint {
    /// Builds the constraint from token ids. `end_of_text` are the ids that may end a choice which is a
    /// prefix of another.
    ///
    /// # Errors
    /// [`Error::Constraint`] if there is no choice, one is empty, or one is a prefix of another and
    /// there is no end-of-text token to distinguish them.
    pub fn new(choices: &[Vec<i64>], end_of_text: &[i64]) -> Result<ChoiceConstraint> {
        if choices.is_empty() || choices.iter().any(Vec::is_empty) {
            let why = "the list of choices needs at least one entry, and no entry may be empty";
            return Err(Error::Constraint(why.to_owned()));
        }
        let mut nodes = vec![Node::default()];
        for choice in choices {
            let mut node = 0;
            for &id in choice {
                // The index that a new node would get; an entry with this index is new.
                let new = nodes.len();
                let next = *nodes[node].next.entry(id).or_insert(new);
                if next == new {
                    nodes.push(Node::default());
                }
                node = next;
            }
            nodes[node].ends = true;
        }
        let open = nodes.iter().any(|node| node.ends && !node.next.is_empty());
        if open && end_of_text.is_empty() {
            let why =
                "one choice is a prefix of another; set `eos_token_id` to end the shorter one";
            return Err(Error::Constraint(why.to_owned()));
        }
        Ok(ChoiceConstraint {
            nodes: Arc::new(nodes),
            end_of_text: end_of_text.into(),
            node: Some(0),
        })
    }

    /// Builds the constraint from strings, which `tokenizer` encodes without special tokens.
    ///
    /// # Errors
    /// As [`ChoiceConstraint::new`], and [`Error::Tokenizer`].
    pub fn from_texts(
        tokenizer: &Tokenizer,
        choices: &[impl AsRef<str>],
        end_of_text: &[i64],
    ) -> Result<ChoiceConstraint> {
        let choices = choices
            .iter()
            .map(|text| encode(tokenizer, text.as_ref()))
            .collect::<Result<Vec<_>>>()?;
        ChoiceConstraint::new(&choices, end_of_text)
    }
}

impl Constraint for ChoiceConstraint {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<()> {
        let Some(node) = self.node.map(|index| &self.nodes[index]) else {
            return Ok(());
        };
        node.next.keys().for_each(|&id| mask.allow(id));
        if node.ends {
            self.end_of_text.iter().for_each(|&id| mask.allow(id));
        }
        Ok(())
    }

    fn advance(&mut self, token: i64) -> Result<()> {
        let node = self.node.map(|index| &self.nodes[index]);
        let next = node.and_then(|node| node.next.get(&token).copied());
        let ended = node.is_some_and(|node| node.ends) && self.end_of_text.contains(&token);
        if next.is_none() && !ended {
            let why = format!("token {token} continues none of the choices");
            return Err(Error::Constraint(why));
        }
        self.node = next;
        Ok(())
    }

    fn is_finished(&self) -> bool {
        self.node
            .is_none_or(|index| self.nodes[index].next.is_empty())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(constraint: &mut ChoiceConstraint) -> Vec<i64> {
        let mut mask = TokenMask::new(50);
        constraint.allowed(&mut mask).unwrap();
        (0..50).filter(|&id| mask.is_allowed(id)).collect()
    }

    #[test]
    fn only_beginnings_of_choices_are_allowed_and_a_whole_one_ends() {
        let choices = [vec![5, 6], vec![5, 7, 8], vec![9], vec![5, 7]];
        let mut constraint = ChoiceConstraint::new(&choices, &[2]).unwrap();
        assert_eq!(allowed(&mut constraint), [5, 9]);
        constraint.advance(5).unwrap();
        assert_eq!(allowed(&mut constraint), [6, 7]);
        let mut other = constraint.fork();
        other.advance(6).unwrap();
        assert!(other.is_finished());
        constraint.advance(7).unwrap();
        assert_eq!(allowed(&mut constraint), [2, 8], "it may end here or go on");
        assert!(!constraint.is_finished());
        assert!(constraint.clone().advance(6).is_err());
        constraint.advance(2).unwrap();
        assert!(constraint.is_finished());
        assert_eq!(allowed(&mut constraint), [] as [i64; 0]);
    }

    #[test]
    fn choices_that_cannot_be_told_apart_are_refused() {
        for (choices, part) in [
            (vec![], "at least one"),
            (vec![vec![1], vec![]], "no entry may be empty"),
            (vec![vec![1], vec![1, 2]], "prefix of another"),
        ] {
            let error = ChoiceConstraint::new(&choices, &[]).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
