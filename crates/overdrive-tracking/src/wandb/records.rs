//! The messages of a `.wandb` file: the subset of `wandb_internal.proto` that metrics need, with W&B's field numbers.
//! They are defined here because the protobuf compiler would otherwise be needed on the user's machine.

use prost::{Message, Oneof};
use serde_json::Value;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(oneof = "Kind", tags = "2, 3, 5, 17, 18, 21")]
    pub(super) kind: Option<Kind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Kind {
    #[prost(message, tag = "2")]
    History(History),
    #[prost(message, tag = "3")]
    Summary(Update),
    #[prost(message, tag = "5")]
    Config(Update),
    #[prost(message, tag = "17")]
    Run(Run),
    #[prost(message, tag = "18")]
    Exit(Exit),
    #[prost(message, tag = "21")]
    Header(Header),
}

/// A value under its name: `HistoryItem`, `SummaryItem` and `ConfigItem` have the same fields.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Item {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "16")]
    pub(super) value_json: String,
}

impl Item {
    pub(super) fn new(key: impl Into<String>, value: &Value) -> Self {
        Self {
            key: key.into(),
            value_json: value.to_string(),
        }
    }
}

/// The values of a step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub(super) item: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<HistoryStep>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HistoryStep {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

/// Values that replace earlier ones: `SummaryRecord` and `ConfigRecord` have the same fields.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Update {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<Item>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Run {
    #[prost(string, tag = "1")]
    pub(super) run_id: String,
    #[prost(string, tag = "2")]
    pub(super) entity: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<Update>,
    #[prost(string, tag = "6")]
    pub(super) run_group: String,
    #[prost(string, tag = "7")]
    pub(super) job_type: String,
    #[prost(string, tag = "8")]
    pub(super) display_name: String,
    #[prost(string, tag = "9")]
    pub(super) notes: String,
    #[prost(string, repeated, tag = "10")]
    pub(super) tags: Vec<String>,
    #[prost(message, optional, tag = "17")]
    pub(super) start_time: Option<Timestamp>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub(super) exit_code: i32,
    /// Seconds.
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(message, optional, tag = "1")]
    pub(super) version_info: Option<VersionInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct VersionInfo {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    #[prost(string, tag = "2")]
    pub(super) min_consumer: String,
}
