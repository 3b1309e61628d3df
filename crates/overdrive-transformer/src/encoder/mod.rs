//! Bidirectional encoders: BERT, RoBERTa, XLM-RoBERTa and ModernBERT with their heads.

mod backbone;
mod config;
mod config_json;
mod head;
mod input;
mod layout;
mod load;
mod model;
mod parameters;

pub use config::{EncoderConfig, EncoderFamily, ProblemType};
pub use head::{EncoderModel, MaskedLm, SequenceClassifier};
pub use input::EncoderInput;
pub(crate) use load::EncoderTensors;
pub use model::{Encoder, LoadReport};

/// The head of an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeadKind {
    /// No head, except for the pooler of BERT and RoBERTa: `BertModel`.
    Base,
    /// Logits of the vocabulary: `BertForMaskedLM`.
    MaskedLm,
    /// Logits of classes: `BertForSequenceClassification`.
    Classifier,
}

/// The type of a head, which distinguishes [`MaskedLm`], [`SequenceClassifier`] and [`EncoderModel`] at compile time.
pub trait EncoderHead: sealed::Sealed + std::fmt::Debug {
    /// The head.
    const KIND: HeadKind;
}

/// The type of [`HeadKind::Base`].
#[derive(Debug)]
pub enum BaseHead {}

/// The type of [`HeadKind::MaskedLm`].
#[derive(Debug)]
pub enum MaskedLmHead {}

/// The type of [`HeadKind::Classifier`].
#[derive(Debug)]
pub enum ClassifierHead {}

impl EncoderHead for BaseHead {
    const KIND: HeadKind = HeadKind::Base;
}

impl EncoderHead for MaskedLmHead {
    const KIND: HeadKind = HeadKind::MaskedLm;
}

impl EncoderHead for ClassifierHead {
    const KIND: HeadKind = HeadKind::Classifier;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::BaseHead {}
    impl Sealed for super::MaskedLmHead {}
    impl Sealed for super::ClassifierHead {}
}
