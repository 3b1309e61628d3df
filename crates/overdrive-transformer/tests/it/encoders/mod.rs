//! Encoders against transformers, on the random checkpoints that `fixtures/gen_encoders.py` makes.
//!
//! Tolerances: 1e-5 for hidden states, logits and losses (fp32 sums of up to 64 terms in another order), 1e-4 of
//! each gradient's largest element, or of 1e-3 where it is smaller (the bias of keys has a gradient of zero).

mod checkpoints;
mod parity;
mod training;

use overdrive_transformer::{EncoderInput, EncoderModel, MaskedLm, SequenceClassifier};
use std::collections::HashMap;
use tch::Tensor;

use crate::common::fixture;

const MASKED: [&str; 5] = [
    "bert_mlm",
    "bert_mlm_untied",
    "roberta_mlm",
    "modernbert_mlm",
    "modernbert_biases",
];
const CLASSIFIERS: [&str; 4] = [
    "bert_classifier",
    "roberta_regression",
    "xlm_roberta_regression",
    "modernbert_classifier",
];
const BASES: [&str; 4] = [
    "bert_base",
    "roberta_base",
    "xlm_roberta_base",
    "modernbert_base",
];

fn masked(case: &str) -> MaskedLm {
    MaskedLm::from_pretrained(fixture(case), &Default::default()).unwrap()
}

fn classifier(case: &str) -> SequenceClassifier {
    SequenceClassifier::from_pretrained(fixture(case), &Default::default()).unwrap()
}

fn base(case: &str) -> EncoderModel {
    EncoderModel::from_pretrained(fixture(case), &Default::default()).unwrap()
}

/// The padded batch of a fixture.
fn batch(want: &HashMap<String, Tensor>) -> EncoderInput<'_> {
    let input = EncoderInput::new(&want["input_ids"]).with_attention_mask(&want["attention_mask"]);
    match want.get("token_type_ids") {
        Some(types) => input.with_token_type_ids(types),
        None => input,
    }
}

/// `values (B, T, C)` with zeros for padding.
fn real(want: &HashMap<String, Tensor>, values: &Tensor) -> Tensor {
    values * want["attention_mask"].unsqueeze(-1)
}
