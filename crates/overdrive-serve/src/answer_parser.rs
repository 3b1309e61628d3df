//! The reasoning, the content and the tool calls of an answer.

use overdrive_generation::{AnswerText, ReasoningParser};

use crate::tools::{ToolCall, ToolCallParser, Tools};

/// Divides the text of an answer while it is generated.
#[derive(Debug, Clone)]
pub(crate) struct AnswerParser {
    reasoning: ReasoningParser,
    /// `None` if the request has no tools.
    calls: Option<ToolCallParser>,
}

impl AnswerParser {
    pub(crate) fn new(reasoning: ReasoningParser, tools: Option<Tools>) -> AnswerParser {
        AnswerParser {
            reasoning,
            calls: tools.map(ToolCallParser::new),
        }
    }

    /// Returns `true` while the answer is in its reasoning.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.reasoning.is_reasoning()
    }

    /// Appends a piece of the answer, and returns the text that is certain now and belongs to no call.
    pub(crate) fn push(&mut self, piece: &str) -> AnswerText {
        let mut text = self.reasoning.push(piece);
        if let Some(calls) = &mut self.calls {
            text.content = calls.push(&text.content);
        }
        text
    }

    /// Returns the rest of the text, and the calls.
    pub(crate) fn finish(self) -> (AnswerText, Vec<ToolCall>) {
        let mut text = self.reasoning.finish();
        let Some(mut parser) = self.calls else {
            return (text, Vec::new());
        };
        text.content = parser.push(&text.content);
        let (rest, calls) = parser.finish();
        text.content.push_str(&rest);
        (text, calls)
    }
}
