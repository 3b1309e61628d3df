//! Tests of answering lists of conversations.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use overdrive_generation::{
    Answer, ChatBatchOptions, ChatTemplate, EngineConfig, EngineModel, Error, FinishReason,
    GenerateOptions, GenerationConfig, Message, RaggedStep, Tokenizer, chat_batch, chat_batch_with,
    conversation_from_json, generate_with_options,
};
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
use serde_json::json;
use tch::Tensor;

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(crate::support::byte_tokenizer())
}

fn model() -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size: 257,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        max_position_embeddings: 256,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

fn template() -> ChatTemplate {
    let source = "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who?') }}\
                  {% endif %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\
                  {% if add_generation_prompt %}assistant:{% endif %}";
    ChatTemplate::new(source)
        .unwrap()
        .with_special_token("eos_token", "<end>")
}

#[test]
fn answers_come_in_order_each_as_if_alone_and_errors_stay_with_their_conversation() {
    let (model, tokenizer, template) = (model(), tokenizer(), template());
    let system = Message::system("You are a long system prompt that all of them share.");
    let mut conversations: Vec<Vec<Message>> = (0..6)
        .map(|n| vec![system.clone(), Message::user(format!("question {n}"))])
        .collect();
    conversations.insert(2, vec![]);
    conversations.insert(4, vec![Message::new("nobody", "hello")]);
    conversations.insert(5, vec![Message::user("x".repeat(300))]);
    let config = GenerationConfig {
        max_new_tokens: Some(24),
        do_sample: true,
        seed: Some(11),
        stop_strings: vec!["\n".to_owned()],
        ..GenerationConfig::default()
    };
    let engine = EngineConfig {
        max_num_seqs: 2,
        num_blocks: Some(32),
        ..EngineConfig::default()
    };
    let options = ChatBatchOptions {
        engine,
        ..ChatBatchOptions::default()
    };
    let answers = chat_batch(
        &model,
        &tokenizer,
        &template,
        &conversations,
        &config,
        &options,
    )
    .unwrap();
    assert_eq!(answers.len(), 9);
    assert!(matches!(answers[2], Err(Error::Conversation(_))));
    assert_eq!(
        answers[4].as_ref().unwrap_err().to_string(),
        "chat template: who?"
    );
    assert!(matches!(answers[5], Err(Error::PromptTooLong { .. })));
    let alone_config = GenerationConfig {
        eos_token_id: vec![256],
        ..config
    };
    let options = GenerateOptions {
        tokenizer: Some(&tokenizer),
        ..GenerateOptions::default()
    };
    for (messages, answer) in conversations.iter().zip(&answers) {
        let Ok(answer) = answer else { continue };
        let prompt = template
            .encode(&tokenizer, messages, &Default::default())
            .unwrap();
        assert_eq!(answer.prompt_tokens, prompt.len());
        assert!(
            prompt.contains(&256),
            "the template's end of text is one token"
        );
        let alone = generate_with_options(&model, &[prompt], &alone_config, &options, |_| {
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(answer.completions[0].tokens, alone.new_tokens(0));
        assert_eq!(answer.text, alone.texts[0]);
        assert_eq!(answer.message().role(), "assistant");
        assert_eq!(answer.message().content(), Some(answer.text.as_str()));
    }
}

#[test]
fn the_end_of_text_of_the_template_ends_an_answer() {
    let (model, tokenizer, template) = (model(), tokenizer(), template());
    let config = GenerationConfig {
        max_new_tokens: Some(24),
        logit_bias: [(256, 100.0)].into_iter().collect(),
        ..GenerationConfig::default()
    };
    let conversations = [vec![Message::user("hello")]];
    let answers = chat_batch(
        &model,
        &tokenizer,
        &template,
        &conversations,
        &config,
        &ChatBatchOptions::default(),
    )
    .unwrap();
    let answer = answers[0].as_ref().unwrap();
    assert_eq!(answer.text, "");
    assert_eq!(answer.completions[0].tokens, [256]);
    assert_eq!(answer.completions[0].finish_reason, FinishReason::EndOfText);
}

#[test]
fn conversations_are_read_from_the_usual_shapes_of_json() {
    let list = json!([{"role": "user", "content": "hi", "name": "x"}]);
    for value in [
        list.clone(),
        json!({"messages": list}),
        json!({"id": 3, "conversations": list}),
    ] {
        let messages = conversation_from_json(&value).unwrap();
        assert_eq!(
            (messages[0].role(), messages[0].content()),
            ("user", Some("hi"))
        );
        assert_eq!(messages[0].get("name"), Some(&json!("x")));
    }
    // As in OpenAI's API, a message that calls tools needs no content.
    let calls = json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]);
    let messages = conversation_from_json(&calls).unwrap();
    assert_eq!((messages.len(), messages[0].content()), (1, Some("")));
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]);
    let messages = conversation_from_json(&parts).unwrap();
    assert_eq!(messages[0].content(), Some("a\nb"));
    let with_system = json!({"messages": list, "system": "s", "tools": []});
    let messages = conversation_from_json(&with_system).unwrap();
    assert_eq!(
        (messages[0].role(), messages[0].content()),
        ("system", Some("s"))
    );
    assert_eq!(messages.len(), 2);
    for (value, want) in [
        (json!("hi"), "neither a list of messages"),
        (json!({"text": "hi"}), "no list under `messages`"),
        (json!([{"content": "hi"}]), "no object with a `role`"),
        (
            json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": null}]),
            "`messages[1].content` is missing or null",
        ),
        (
            json!([{"role": "user", "content": [{"type": "image_url"}]}]),
            "`messages[0].content` has a part of type \"image_url\"",
        ),
        (
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            "`messages[0].content` has a part of type \"text\"; its `text` must be a string",
        ),
        (
            json!([{"role": "user", "content": 3}]),
            "`messages[0].content` must be a string or a list of parts",
        ),
        (
            json!({"messages": list, "tools": [{}]}),
            "the object has `tools`",
        ),
        (
            json!({"messages": [{"role": "system", "content": "a"}], "system": "b"}),
            "`system` in addition to a system message",
        ),
    ] {
        let error = conversation_from_json(&value).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn an_answer_is_handed_out_before_later_ones_are_computed() {
    let (model, tokenizer, template) = (model(), tokenizer(), template());
    let conversations: Vec<Vec<Message>> = (0..5)
        .map(|n| match n {
            1 => vec![],
            n => vec![Message::user(format!("question {n}"))],
        })
        .collect();
    let config = GenerationConfig {
        max_new_tokens: Some(9),
        ..GenerationConfig::default()
    };
    // One sequence at a time, so that the second answer is far away when the first one is there.
    let mut options = ChatBatchOptions::default();
    options.engine.max_num_seqs = 1;
    let calls = Counting(&model, Cell::new(0));
    let mut steps = Vec::new();
    let mut texts = Vec::new();
    let run =
        |on_answer: &mut dyn FnMut(overdrive_generation::Result<Answer>) -> ControlFlow<()>| {
            chat_batch_with(
                &calls,
                &tokenizer,
                &template,
                &conversations,
                &config,
                &options,
                on_answer,
            )
            .unwrap();
        };
    run(&mut |answer| {
        steps.push(calls.1.get());
        texts.push(
            answer
                .map(|answer| answer.text)
                .map_err(|error| error.to_string()),
        );
        ControlFlow::Continue(())
    });
    // Nine steps an answer; the empty conversation costs none.
    assert_eq!(steps, [9, 9, 18, 27, 36]);
    assert!(texts[1].as_ref().unwrap_err().contains("conversation"));
    let all = chat_batch(
        &model,
        &tokenizer,
        &template,
        &conversations,
        &config,
        &options,
    )
    .unwrap();
    for (text, answer) in texts.iter().zip(&all) {
        assert_eq!(
            text.as_ref().ok(),
            answer.as_ref().ok().map(|one| &one.text)
        );
    }
    // A break ends the computation.
    let before = calls.1.get();
    let mut answers = 0;
    run(&mut |_| {
        answers += 1;
        ControlFlow::Break(())
    });
    assert_eq!((answers, calls.1.get() - before), (1, 9));
}

/// A model that counts its steps.
struct Counting<'a>(&'a CausalLm, Cell<usize>);

impl EngineModel for Counting<'_> {
    forwards_shape!(0);

    fn forward(&self, step: RaggedStep<'_, '_>) -> overdrive_generation::Result<Tensor> {
        self.1.set(self.1.get() + 1);
        EngineModel::forward(self.0, step)
    }
}
