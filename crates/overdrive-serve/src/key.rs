use std::fmt;

use overdrive_core::check_option;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::Result;

/// The environment variable of [`ApiKey::from_env`].
const VARIABLE: &str = "OVERDRIVE_API_KEY";

/// The key that clients send as `Authorization: Bearer KEY` to every route except `/health` and `/metrics`.
///
/// Only its SHA-256 is kept. The comparison takes a time that depends neither on the key nor on its length.
#[derive(Clone)]
pub struct ApiKey([u8; 32]);

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey")
    }
}

impl ApiKey {
    /// Returns the key with this text.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) if the text is empty or contains white space, which a
    /// header cannot carry unchanged.
    pub fn new(key: &str) -> Result<ApiKey> {
        let valid = !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic());
        let expected = "printable ASCII without spaces; unset it to serve without a key";
        check_option(valid, VARIABLE, "\"…\"", expected)?;
        Ok(ApiKey(digest(key)))
    }

    /// Returns the key in the environment variable `OVERDRIVE_API_KEY`; `None` if it is not set.
    ///
    /// # Errors
    /// As for [`ApiKey::new`]: an empty variable is an error, not a server without a key.
    pub fn from_env() -> Result<Option<ApiKey>> {
        match std::env::var_os(VARIABLE) {
            None => Ok(None),
            Some(key) => ApiKey::new(&key.to_string_lossy()).map(Some),
        }
    }

    /// Returns `true` if the value of an `Authorization` header carries the key.
    pub(crate) fn admits(&self, header: Option<&[u8]>) -> bool {
        let given = header.and_then(|value| std::str::from_utf8(value).ok());
        let token = given.and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            // Scheme names are case-insensitive (RFC 9110).
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        token.is_some_and(|token| digest(token).ct_eq(&self.0).into())
    }
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_under_the_right_scheme_is_admitted() {
        let key = ApiKey::new("sk-1234").unwrap();
        for (header, admitted) in [
            ("Bearer sk-1234", true),
            ("bearer  sk-1234", true),
            ("Bearer sk-123", false),
            ("Bearer sk-12345", false),
            ("Basic sk-1234", false),
            ("sk-1234", false),
            ("", false),
        ] {
            assert_eq!(key.admits(Some(header.as_bytes())), admitted, "{header:?}");
        }
        assert!(!key.admits(None));
        assert!(!key.admits(Some(b"Bearer \xff")));
        assert!(!format!("{key:?}").contains("sk"));
        for wrong in ["", "a b", "ä"] {
            assert!(ApiKey::new(wrong).is_err(), "{wrong:?}");
        }
    }
}
