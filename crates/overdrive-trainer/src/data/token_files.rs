//! Files of tokens as the data of a run: stores of Overdrive, `.bin` files of nanoGPT and llm.c.

use std::path::{Path, PathBuf};

use overdrive_core::Error as CommonError;
use overdrive_datasets::{
    BuildOptions, RawOptions, TokenStore, TokenWidth, Tokenizer, load_tokenizer, tokenizer_digest,
};

use crate::arguments::{SampleBy, TrainingArguments, is_token_file};
use crate::error::invalid;
use crate::{Error, Result};

/// The file of tokens to train on, and the one for validation, if there is one.
#[derive(Debug)]
pub(crate) struct TokenFiles {
    train: PathBuf,
    validation: Option<PathBuf>,
}

/// Opened files of tokens.
#[derive(Debug)]
pub(crate) struct OpenedTokens {
    pub(crate) train: TokenStore,
    pub(crate) validation: Option<TokenStore>,
    pub(crate) vocab_size: u64,
}

impl TokenFiles {
    /// Returns the token files that `data` names: a file, with the validation file beside it or after it in the list,
    /// or a folder that contains them. Returns `None` if `data` names text.
    ///
    /// # Errors
    /// An error if token files are named together with text, or if it is not clear which one is for training.
    pub(crate) fn of(data: &[PathBuf]) -> Result<Option<Self>> {
        if let [folder] = data
            && folder.is_dir()
        {
            return in_folder(folder);
        }
        let Some(named) = data.iter().find(|path| is_token_file(path)) else {
            return Ok(None);
        };
        if let Some(other) = data.iter().find(|path| !is_token_file(path)) {
            let expected = "a file of tokens, because `data` also names one; train on text or on tokens, or give the text to `tokenize`";
            return invalid("data", other.display(), expected);
        }
        let is_validation = |path: &&PathBuf| split_of(path) == Some(Split::Validation);
        match data {
            [train] => Ok(Some(Self {
                validation: beside(train),
                train: named.clone(),
            })),
            [train, held] | [held, train] if is_validation(&held) && !is_validation(&train) => {
                Ok(Some(Self {
                    train: train.clone(),
                    validation: Some(held.clone()),
                }))
            }
            _ => {
                let expected = "one file of tokens to train on, and at most one for validation with `val` in its \
                                name; join several files by `tokenize` of their text";
                let files: Vec<_> = data.iter().map(|path| path.display().to_string()).collect();
                invalid("data", files.join(" "), expected)
            }
        }
    }

    /// Checks that no option requires text.
    pub(crate) fn check(&self, arguments: &TrainingArguments) -> Result<()> {
        let expected =
            "left out with a file of tokens; give it to `tokenize`, which reads the text";
        if arguments.remove_duplicates {
            return invalid("remove_duplicates", true, expected);
        }
        if arguments.sample_by == SampleBy::Line {
            return invalid("sample_by", "line", expected);
        }
        use crate::arguments::DEFAULT_LENGTH_COLUMN;
        if arguments.group_by_length && arguments.length_column_name != DEFAULT_LENGTH_COLUMN {
            let expected = "left out with a file of tokens, which has no columns; the tokens are counted instead";
            return invalid(
                "length_column_name",
                &arguments.length_column_name,
                expected,
            );
        }
        Ok(())
    }

    /// Returns the tokenizer in the folder of the file, as `tokenize` writes it.
    pub(crate) fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let path = self.train.with_file_name("tokenizer.json");
        Ok(path.is_file().then(|| load_tokenizer(path)).transpose()?)
    }

    /// Opens the files, and checks every token against the vocabulary: that of `tokenizer`, else that of the header,
    /// else `vocab_size`.
    pub(crate) fn open(
        &self,
        tokenizer: Option<&Tokenizer>,
        arguments: &TrainingArguments,
    ) -> Result<OpenedTokens> {
        let vocab_size = tokenizer.map_or(arguments.vocab_size, |tokenizer| {
            tokenizer.get_vocab_size(true) as u64
        });
        let end = BuildOptions::default().end_of_document;
        let end = end.and_then(|end| tokenizer?.token_to_id(&end));
        let open = |path: &Path| {
            let options = RawOptions {
                width: TokenWidth::for_vocab_size(vocab_size),
                vocab_size: Some(vocab_size),
                end_of_document: end,
            };
            let store = TokenStore::open_any(path, &options);
            let store =
                store.or_else(|error| too_small(error, path, tokenizer.is_some(), options))?;
            // Without this check, training on tokens that a disk has corrupted would go unnoticed.
            store.verify()?;
            if let Some(tokenizer) = tokenizer {
                store.expect_tokenizer(tokenizer_digest(tokenizer)?)?;
            }
            Ok::<_, Error>(store)
        };
        let train = open(&self.train)?;
        let validation = self.validation.as_deref().map(open).transpose()?;
        // A store records the vocabulary size of its tokenizer, which may exceed the ids that occur.
        let of_stores = [Some(&train), validation.as_ref()].into_iter().flatten();
        let of_stores = of_stores.filter_map(TokenStore::vocab_size).max();
        Ok(OpenedTokens {
            vocab_size: match tokenizer {
                Some(_) => vocab_size,
                None => of_stores.unwrap_or(vocab_size),
            },
            train,
            validation,
        })
    }
}

impl OpenedTokens {
    /// Logs the files.
    pub(crate) fn describe(&self, say: &mut dyn FnMut(&str)) {
        say(&format!(
            "corpus      {} tokens in {} ({} bytes each)",
            self.train.len(),
            self.train.path().display(),
            self.train.width().bytes(),
        ));
        if let Some(validation) = &self.validation {
            let (tokens, path) = (validation.len(), validation.path().display());
            say(&format!(
                "            validation on {tokens} tokens in {path}"
            ));
        }
    }
}

/// Returns an error with the vocabulary that the file needs, if it has tokens outside of `vocab_size`.
fn too_small(
    error: overdrive_datasets::Error,
    path: &Path,
    has_tokenizer: bool,
    options: RawOptions,
) -> Result<TokenStore> {
    use overdrive_datasets::Error::TokenOutOfVocabulary;
    let (TokenOutOfVocabulary { .. }, Some(vocab_size), false) =
        (&error, options.vocab_size, has_tokenizer)
    else {
        return Err(error.into());
    };
    let unchecked = RawOptions {
        vocab_size: None,
        ..options
    };
    let largest = TokenStore::open_any(path, &unchecked)?.largest_token();
    let expected = format!(
        "at least {}, because {} has the token {}; give the vocabulary of the tokenizer that made the file by \
         `--vocab-size` (GPT-2: 50257), or the tokenizer by `--tokenizer`",
        u64::from(largest.unwrap_or(0)) + 1,
        path.display(),
        largest.unwrap_or(0),
    );
    invalid("vocab_size", vocab_size, expected)
}

/// Returns the token files in a folder: `train.bin`, as in nanoGPT, or the only token file besides the validation file.
/// Returns `None` if there is none.
fn in_folder(folder: &Path) -> Result<Option<TokenFiles>> {
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(CommonError::io("read the folder", folder))?;
    let paths = entries.into_iter().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = paths
        .filter(|path| is_token_file(path) && path.is_file())
        .collect();
    // The order of `read_dir` differs between machines.
    files.sort();
    let named = files
        .iter()
        .find(|path| path.file_stem().is_some_and(|stem| stem == "train"));
    if let Some(train) = named {
        return TokenFiles::of(std::slice::from_ref(train));
    }
    files.retain(|path| split_of(path) != Some(Split::Validation));
    match files.as_slice() {
        [] => Ok(None),
        // A folder of text may also contain a `.bin` file; the files of `tokenize` end in `.tokens`.
        [only] if only.extension().is_some_and(|end| end == "tokens") => {
            TokenFiles::of(std::slice::from_ref(only))
        }
        files
            if files
                .iter()
                .all(|path| path.extension().is_some_and(|end| end == "bin")) =>
        {
            Ok(None)
        }
        _ => {
            let expected = "one of the files of tokens in the folder; give its path";
            invalid("data", folder.display(), expected)
        }
    }
}

/// The split that the name of a file indicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    Train,
    Validation,
}

fn split_of(path: &Path) -> Option<Split> {
    let stem = path.file_stem()?.to_str()?;
    // Names such as `tiny_shakespeare_train` and `fineweb_val_000000` are recognized too.
    stem.split(['_', '-', '.']).find_map(|word| match word {
        "train" => Some(Split::Train),
        "val" | "valid" | "validation" => Some(Split::Validation),
        _ => None,
    })
}

/// Returns the validation file beside a training file: `val.bin` beside `train.bin`.
fn beside(train: &Path) -> Option<PathBuf> {
    if split_of(train) != Some(Split::Train) {
        return None;
    }
    let name = train.file_name()?.to_str()?;
    let at = name.rfind("train")?;
    let names = ["val", "valid", "validation"].into_iter();
    let mut paths =
        names.map(|held| train.with_file_name([&name[..at], held, &name[at + 5..]].concat()));
    paths.find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_validation_is_found_beside_the_one_to_train_on() {
        let folder = tempfile::tempdir().unwrap();
        let touch = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, [0, 0]).unwrap();
            path
        };
        let (train, val) = (touch("train.bin"), touch("val.bin"));
        let found = TokenFiles::of(&[folder.path().to_owned()])
            .unwrap()
            .unwrap();
        assert_eq!(
            (&found.train, found.validation.as_ref()),
            (&train, Some(&val))
        );
        let found = TokenFiles::of(&[val.clone(), train.clone()])
            .unwrap()
            .unwrap();
        assert_eq!(
            (&found.train, found.validation.as_ref()),
            (&train, Some(&val))
        );
        let other = touch("tiny_train.bin");
        assert_eq!(TokenFiles::of(&[other]).unwrap().unwrap().validation, None);
        let (shakespeare, held) = (touch("s_train_1.tokens"), touch("s_val_1.tokens"));
        let found = TokenFiles::of(&[shakespeare]).unwrap().unwrap();
        assert_eq!(found.validation, Some(held));
        let error = TokenFiles::of(&[train.clone(), touch("more.bin")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("at most one for validation"), "{error}");
        let error = TokenFiles::of(&[train, touch("a.txt")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("a.txt"), "{error}");
    }

    #[test]
    fn a_folder_of_text_is_not_one_of_tokens() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.txt"), "text").unwrap();
        std::fs::write(folder.path().join("firmware.bin"), "x").unwrap();
        let data = [folder.path().to_owned()];
        assert!(TokenFiles::of(&data).unwrap().is_none());
        std::fs::write(folder.path().join("text.tokens"), "x").unwrap();
        assert!(TokenFiles::of(&data).is_err());
        std::fs::remove_file(folder.path().join("firmware.bin")).unwrap();
        assert!(TokenFiles::of(&data).unwrap().is_some());
    }
}
