use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::engine::Completions;
use crate::{
    AnswerText, ChatTemplate, ChatTemplateOptions, Completion, Engine, EngineConfig, EngineModel,
    EngineStatistics, Error, Event, GenerationConfig, Message, ReasoningParser, Request, RequestId,
    Result,
};

/// The options of [`chat_batch`], apart from the generation config.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ChatBatchOptions {
    /// The options of the chat template.
    pub template: ChatTemplateOptions,
    /// The options of the engine.
    pub engine: EngineConfig,
}

/// The answer to a conversation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Answer {
    /// The text of the answer, without special tokens and reasoning.
    pub text: String,
    /// The [reasoning](ReasoningParser) before the answer; empty if there is none.
    pub reasoning: String,
    /// The number of tokens of the rendered conversation.
    pub prompt_tokens: usize,
    /// The tokens of the answer and its finish reason; several with `num_return_sequences`, of which `text` is the
    /// first.
    pub completions: Vec<Completion>,
}

impl Answer {
    /// Returns the answer as the next message of the conversation.
    pub fn message(&self) -> Message {
        let text = AnswerText {
            reasoning: self.reasoning.clone(),
            content: self.text.clone(),
        };
        text.into()
    }
}

/// Answers many conversations at once: each is rendered with the model's template and continued by an
/// [`Engine`], which keeps the batch full even if the lengths of the answers differ, and computes a common prefix
/// (a system prompt) only once. The answers are in the order of the conversations.
///
/// A conversation that cannot be answered gets its own error; the others are still answered. If
/// `config` names no end-of-text token, the template's `eos_token` is used.
///
/// # Errors
/// An error if the engine cannot be created or the model fails.
///
/// ```
/// use std::sync::Arc;
/// use overdrive_generation::{ChatTemplate, GenerationConfig, Message, Tokenizer, chat_batch};
/// use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let json = r#"{"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"},
/// #     "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "hi": 1}, "unk_token": "<unk>"}}"#;
/// # let config = LlamaConfig { vocab_size: 2, hidden_size: 32, intermediate_size: 64,
/// #     num_hidden_layers: 1, num_attention_heads: 4, ..LlamaConfig::default() };
/// # let model = CausalLm::new(&config.into(), &InitOptions::default())?;
/// # let tokenizer: Arc<Tokenizer> = Arc::new(json.parse::<Tokenizer>().map_err(|e| e.to_string())?);
/// // In a program: CausalLm::from_pretrained, Tokenizer::from_file and ChatTemplate::from_dir.
/// let template = ChatTemplate::new("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")?;
/// let conversations = vec![vec![Message::user("hi")], vec![]];
/// let config = GenerationConfig { max_new_tokens: Some(5), ..GenerationConfig::default() };
/// let answers =
///     chat_batch(&model, &tokenizer, &template, &conversations, &config, &Default::default())?;
/// assert_eq!(answers[0].as_ref().unwrap().completions[0].tokens.len(), 5);
/// assert!(answers[1].is_err()); // an empty conversation
/// # Ok(())
/// # }
/// ```
pub fn chat_batch<M: EngineModel>(
    model: M,
    tokenizer: &Arc<Tokenizer>,
    template: &ChatTemplate,
    conversations: &[Vec<Message>],
    config: &GenerationConfig,
    options: &ChatBatchOptions,
) -> Result<Vec<Result<Answer>>> {
    let mut answers = Vec::with_capacity(conversations.len());
    chat_batch_with(
        model,
        tokenizer,
        template,
        conversations,
        config,
        options,
        |answer| {
            answers.push(answer);
            ControlFlow::Continue(())
        },
    )?;
    Ok(answers)
}

/// Works like [`chat_batch`], but passes each answer to `on_answer` as soon as it and all earlier ones are ready, in
/// the order of the conversations, so that a program that stops early can keep the answers so far. If `on_answer`
/// breaks, the rest is not computed. Returns the counters of the engine.
///
/// # Errors
/// As [`chat_batch`].
pub fn chat_batch_with<M: EngineModel>(
    model: M,
    tokenizer: &Arc<Tokenizer>,
    template: &ChatTemplate,
    conversations: &[Vec<Message>],
    config: &GenerationConfig,
    options: &ChatBatchOptions,
    mut on_answer: impl FnMut(Result<Answer>) -> ControlFlow<()>,
) -> Result<EngineStatistics> {
    let config = config.clone().or_end_of_text(template, tokenizer);
    let mut engine =
        Engine::new(model, options.engine.clone())?.with_tokenizer(Arc::clone(tokenizer));
    engine.warm_up()?;
    // The conversation of each request, and the finished answers that wait for earlier ones.
    let mut requests = HashMap::new();
    let mut waiting: BTreeMap<usize, Result<Answer>> = BTreeMap::new();
    for (index, messages) in conversations.iter().enumerate() {
        let mut submit = || {
            let prompt = template.encode(tokenizer, messages, &options.template)?;
            let tokens = prompt.len();
            let reasoning = ReasoningParser::new(tokenizer, &prompt)?;
            let id = engine.submit(Request::new(prompt, config.clone()))?;
            Ok((id, tokens, reasoning))
        };
        match submit() {
            Ok((id, prompt_tokens, reasoning)) => {
                let completions = Completions::default();
                requests.insert(
                    id,
                    Pending {
                        index,
                        prompt_tokens,
                        reasoning,
                        completions,
                    },
                );
            }
            // The error replaces the answer of this conversation; the others are still computed.
            Err(error) => drop(waiting.insert(index, Err(error))),
        }
    }
    for next in 0..conversations.len() {
        while !waiting.contains_key(&next) {
            if engine.is_idle() {
                return Err(Error::Scheduler("a request has ended without an answer"));
            }
            for event in engine.step()? {
                take(event, &mut requests, &mut waiting);
            }
        }
        if let Some(answer) = waiting.remove(&next)
            && on_answer(answer).is_break()
        {
            break;
        }
    }
    Ok(engine.statistics())
}

/// The conversation of a request, and its completions.
struct Pending {
    index: usize,
    prompt_tokens: usize,
    reasoning: ReasoningParser,
    completions: Completions,
}

/// Moves the answer of a finished request to the waiting answers.
fn take(
    event: Event,
    requests: &mut HashMap<RequestId, Pending>,
    waiting: &mut BTreeMap<usize, Result<Answer>>,
) {
    let id = event.request();
    let Some(pending) = requests.get_mut(&id) else {
        return;
    };
    let Some(outcome) = pending.completions.take(event) else {
        return;
    };
    let answer = outcome.map(|completions| {
        let text = completions.first().and_then(|first| first.text.as_deref());
        let text = pending.reasoning.clone().parse(text.unwrap_or_default());
        Answer {
            text: text.content,
            reasoning: text.reasoning,
            prompt_tokens: pending.prompt_tokens,
            completions,
        }
    });
    waiting.insert(pending.index, answer);
    requests.remove(&id);
}

/// Reads a conversation from JSON: a list of messages, or an object with one under `messages`,
/// `conversation` or `conversations`, as datasets have it. `system` beside it is its system message. Content that is a list
/// of text parts is joined ([`Message::with_text`]).
///
/// # Errors
/// [`Error::Conversation`] if it is neither, if a message is not an object with a `role`, if its content is no text, or if
/// the object has `tools` or `functions`, which belong in [`ChatTemplateOptions::tools`], or `system` in addition to a
/// system message.
pub fn conversation_from_json(value: &Value) -> Result<Vec<Message>> {
    let wrong = |what: &str| Error::Conversation(what.to_owned());
    let keys = ["messages", "conversation", "conversations"];
    let mut system = None;
    let list = match value {
        Value::Array(list) => list,
        Value::Object(fields) => {
            for key in ["tools", "functions"] {
                let given = fields.get(key).filter(|value| !is_blank(value));
                if given.is_some() {
                    return Err(wrong(&format!(
                        "the object has `{key}`, but all conversations share the tools of the template options"
                    )));
                }
            }
            system = match fields.get("system").filter(|value| !is_blank(value)) {
                None => None,
                Some(Value::String(text)) => Some(text.as_str()),
                Some(_) => return Err(wrong("`system` is not a string")),
            };
            keys.iter()
                .find_map(|key| fields.get(*key)?.as_array())
                .ok_or_else(|| wrong("the object has no list under `messages`"))?
        }
        _ => {
            return Err(wrong(
                "neither a list of messages nor an object with `messages`",
            ));
        }
    };
    let message = |(index, value): (usize, &Value)| match value {
        Value::Object(fields) if fields.get("role").is_some_and(Value::is_string) => {
            let message = Message::from(fields.clone());
            match message.lacks_content() {
                false => message.with_text().map_err(|error| match error {
                    Error::MessageContent(what) => {
                        wrong(&format!("`messages[{index}].content` {what}"))
                    }
                    other => other,
                }),
                true => Err(wrong(&format!(
                    "`messages[{index}].content` is missing or null; give the text of the message"
                ))),
            }
        }
        _ => Err(wrong(&format!("no object with a `role`: {value}"))),
    };
    let mut messages: Vec<Message> = list
        .iter()
        .enumerate()
        .map(message)
        .collect::<Result<_>>()?;
    if let Some(system) = system {
        let own = messages.first().filter(|first| first.role() == "system");
        match own.map(|own| own.content()) {
            None => messages.insert(0, Message::system(system)),
            Some(content) if content == Some(system) => {}
            Some(_) => {
                return Err(wrong("it has `system` in addition to a system message"));
            }
        }
    }
    Ok(messages)
}

/// Returns `true` for null and for an empty text or list.
fn is_blank(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        value => value.is_null(),
    }
}
