//! The serialization of keys that hold one value or a list of them.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub(super) mod ids {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<i64>, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a token id or a list of them")]
        enum Ids {
            One(i64),
            Many(Vec<i64>),
        }
        Ok(match Option::<Ids>::deserialize(deserializer)? {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Many(ids)) => ids,
        })
    }

    pub(in crate::config) fn serialize<S: Serializer>(
        ids: &[i64],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match ids {
            [] => serializer.serialize_none(),
            [one] => serializer.serialize_i64(*one),
            many => many.serialize(serializer),
        }
    }
}

pub(super) mod strings {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<String>, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a text or a list of them")]
        enum Texts {
            One(String),
            Many(Vec<String>),
        }
        Ok(match Option::<Texts>::deserialize(deserializer)? {
            None => Vec::new(),
            Some(Texts::One(text)) => vec![text],
            Some(Texts::Many(texts)) => texts,
        })
    }

    pub(in crate::config) fn serialize<S: Serializer>(
        texts: &[String],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        texts.serialize(serializer)
    }
}
