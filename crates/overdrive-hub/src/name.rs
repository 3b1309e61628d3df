use std::path::Path;

/// The kind of a repository: its place on the hub and in the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum RepositoryKind {
    #[default]
    Model,
    Dataset,
}

impl RepositoryKind {
    /// Returns the name in the paths of the API and in the names of the cache's folders.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            RepositoryKind::Model => "models",
            RepositoryKind::Dataset => "datasets",
        }
    }

    /// Returns the part of an address before the name of the repository.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        }
    }
}

/// A name on the hub: `ORG/NAME[/FILE.gguf][:QUANTIZATION][@REVISION]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubName {
    pub(crate) kind: RepositoryKind,
    pub(crate) repository: String,
    /// A file of the repository.
    pub(crate) file: Option<String>,
    /// The quantization of a GGUF file, such as `Q4_K_M`.
    pub(crate) quantization: Option<String>,
    /// `None`: the branch `main`.
    pub(crate) revision: Option<String>,
}

impl HubName {
    /// Parses a name; `None` if the hub cannot have it.
    pub(crate) fn parse(text: &str) -> Option<HubName> {
        let (text, revision) = match text.split_once('@') {
            Some((text, revision)) => (text, Some(revision.to_owned())),
            None => (text, None),
        };
        let (text, quantization) = match text.split_once(':') {
            Some((text, quantization)) => (text, Some(quantization.to_owned())),
            None => (text, None),
        };
        let parts: Vec<&str> = text.split('/').collect();
        let (repository, file) = match parts.len() {
            1 | 2 => (text.to_owned(), None),
            _ => (parts[..2].join("/"), Some(parts[2..].join("/"))),
        };
        // A third component must be a GGUF file: a folder of a repository is not a model, and `runs/tiny/model` is a
        // path.
        let gguf = |name: &str| name.to_ascii_lowercase().ends_with(".gguf");
        let named = file
            .as_deref()
            .is_none_or(|file| gguf(file) && is_relative_file(file) && quantization.is_none());
        let valid = named
            && !gguf(&repository)
            && repository.split('/').all(is_repository_part)
            && quantization.as_deref().is_none_or(is_quantization)
            && revision.as_deref().is_none_or(is_revision);
        valid.then_some(HubName {
            kind: RepositoryKind::Model,
            repository,
            file,
            quantization,
            revision,
        })
    }

    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

/// Returns `true` for the names that `huggingface_hub.utils.validate_repo_id` accepts.
pub(crate) fn is_repository_part(part: &str) -> bool {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let edge = |letter: char| "-.".contains(letter);
    !part.is_empty()
        && part.len() <= 96
        && part.chars().all(allowed)
        && !part.starts_with(edge)
        && !part.ends_with(edge)
        && !part.contains("--")
        && !part.contains("..")
        && !part.ends_with(".git")
}

fn is_quantization(text: &str) -> bool {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    !text.is_empty() && text.chars().all(allowed)
}

/// Returns `true` if `name` is valid for a branch or tag by those of Git's rules that matter for paths and URLs.
pub(crate) fn is_revision(text: &str) -> bool {
    let allowed = |letter: char| letter.is_ascii_graphic() && !"\\:?*[~^%#".contains(letter);
    text.chars().all(allowed) && is_relative_file(text)
}

/// Returns `true` if `name`, which comes from a hub, is that of a file in a folder or its subfolders.
pub(crate) fn is_relative_file(name: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    !name.contains(['\\', '\0', ':']) && name.split('/').all(plain) && Path::new(name).is_relative()
}

/// Returns `true` for a complete commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, Option<String>, Option<String>, String)> {
        let name = HubName::parse(text)?;
        let revision = name.revision().to_owned();
        Some((name.repository, name.file, name.quantization, revision))
    }

    #[test]
    fn names_have_files_quantizations_and_revisions() {
        let some = |text: &str| Some(text.to_owned());
        let cases = [
            ("gpt2", ("gpt2", None, None, "main")),
            ("org/name", ("org/name", None, None, "main")),
            ("org/name@v1.0", ("org/name", None, None, "v1.0")),
            ("org/name@refs/pr/3", ("org/name", None, None, "refs/pr/3")),
            (
                "org/name:Q4_K_M",
                ("org/name", None, some("Q4_K_M"), "main"),
            ),
            ("org/name:Q8_0@dev", ("org/name", None, some("Q8_0"), "dev")),
            (
                "org/name/a.gguf",
                ("org/name", some("a.gguf"), None, "main"),
            ),
            (
                "org/name/b/a.GGUF@x",
                ("org/name", some("b/a.GGUF"), None, "x"),
            ),
        ];
        for (text, (repository, file, quantization, revision)) in cases {
            let expected = (
                repository.to_owned(),
                file,
                quantization,
                revision.to_owned(),
            );
            assert_eq!(parsed(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn paths_are_no_names() {
        for text in [
            "",
            "/a/b",
            "./a",
            "../a",
            "a/../b",
            "~/a",
            "runs/tiny/model",
            "model.gguf",
            "runs/model.gguf",
            "a//b",
            "a/b/",
            "a b/c",
            "org/name@",
            "org/name@../x",
            "org/name@a//b",
            "org/name:",
            "org/name@a:b",
            "org/name/../x.gguf",
            "org/name/a.gguf:Q4_0",
            "org/na--me",
            "org/name@a\\b",
            "org/.name",
        ] {
            assert_eq!(HubName::parse(text), None, "{text}");
        }
    }
}
