//! Output folders and files: a program overwrites neither its inputs nor a folder that another program wrote, and
//! leaves no half-written folder behind.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::files::{self, UnfinishedFolder};
use crate::{Error, Result, text};

/// The name of the marker file of a folder: the program that wrote it, and the files that it has put there, one a line.
const MARK: &str = ".overdrive-output";

/// The names of the files of a model, an adapter or a run that a program would overwrite.
const NAMES: [&str; 15] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "adapter_config.json",
    "training_args.json",
    "metrics.jsonl",
];

/// The extensions of weights and tokens.
const EXTENSIONS: [&str; 5] = ["safetensors", "bin", "gguf", "onnx", "tokens"];

/// The output folders that this process has created.
static CREATED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A folder that a program may write to: it is new, holds no files of a model or a run, or was written by the same
/// program.
///
/// [`begin`](Self::begin) writes it as a whole. A program that fails or is interrupted before there is a file leaves
/// nothing; one that is killed leaves a folder that no other program takes for a model, and that it may write again.
///
/// ```
/// use overdrive_core::OutputFolder;
///
/// # let folder = tempfile::tempdir()?;
/// let (model, out) = (folder.path().join("model"), folder.path().join("out"));
/// std::fs::create_dir(&model)?;
/// std::fs::write(model.join("tokenizer_config.json"), "{}")?;
///
/// // Before the work; no file is written yet.
/// let inputs = [("--tokenizer", model.as_path())];
/// let output = OutputFolder::check("tokenize", "--out", &out, &inputs)?;
/// let unfinished = output.begin()?;
/// std::fs::write(unfinished.path().join("tokenizer_config.json"), "{}")?;
/// std::fs::write(unfinished.path().join("config.json"), "{}")?;
/// assert!(!out.join("config.json").exists());
/// unfinished.finish()?;
/// assert!(out.join("config.json").exists());
/// // The program may write it again, and no other program may.
/// assert!(OutputFolder::check("tokenize", "--out", &out, &inputs).is_ok());
/// assert!(OutputFolder::check("merge", "--out", &out, &inputs).is_err());
/// assert!(OutputFolder::check("tokenize", "--out", &model, &inputs).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputFolder {
    path: PathBuf,
    program: &'static str,
    option: &'static str,
    /// `true` if the program has written the folder before.
    is_own: bool,
}

impl OutputFolder {
    /// Checks that `program` may write to the folder `path`, which the option `option` gives. `inputs` are the files
    /// and folders that the program reads, each with its option. The folder need not exist.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if the folder is one of the inputs (under any path), is a file, was written by
    /// another program, or holds files of a model, an adapter or a run that this program did not write.
    pub fn check(
        program: &'static str,
        option: &'static str,
        path: impl Into<PathBuf>,
        inputs: &[(&str, &Path)],
    ) -> Result<Self> {
        let path = path.into();
        let refused = |expected: String| Err(Error::option(option, path.display(), expected));
        check_not_read(option, &path, inputs)?;
        if path.exists() && !path.is_dir() {
            return refused("a folder, but a file of this name exists".to_owned());
        }
        let mark = Mark::read(&path)?;
        let is_own = mark.as_ref().is_some_and(|mark| mark.program == program);
        if let Some(other) = mark.filter(|_| !is_own) {
            return refused(format!(
                "another folder, because `{}` wrote this one; choose another or remove it",
                other.program
            ));
        }
        let output = Self {
            path,
            program,
            option,
            is_own,
        };
        match foreign_file(&output.path)? {
            Some(name) if !is_own => Err(output.foreign(&name)),
            _ => Ok(output),
        }
    }

    /// Checks that the folder also has none of the files `names`, which the program writes too, unless the program
    /// wrote them itself.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if the folder has one of them.
    pub fn also_writes(self, names: &[&str]) -> Result<Self> {
        match names.iter().find(|name| self.path.join(name).exists()) {
            Some(name) if !self.is_own => Err(self.foreign(name)),
            _ => Ok(self),
        }
    }

    fn foreign(&self, name: &str) -> Error {
        let Self { program, .. } = self;
        Error::option(
            self.option,
            self.path.display(),
            format!(
                "another folder, because this one has {name}, which `{program}` did not write; \
                 choose another or remove it"
            ),
        )
    }

    /// Creates the folder, if it does not exist, and marks it as written by the program, which writes its files one by
    /// one. [`begin`](Self::begin) is for those that need all of their files, such as a model.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub fn create(&self) -> Result<()> {
        let is_new = !self.path.exists();
        fs::create_dir_all(&self.path).map_err(Error::io("create the folder", &self.path))?;
        if is_new {
            let mut created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
            created.insert(absolute(&self.path));
        }
        let files = Mark::read(&self.path)?.map_or_else(BTreeSet::new, |mark| mark.files);
        self.mark(files)
    }

    /// Creates the folder as [`create`](Self::create) does, and in it an unfinished folder for the files, which
    /// [`UnfinishedOutput::finish`] gives their places. What killed programs have left is removed.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub fn begin(&self) -> Result<UnfinishedOutput> {
        let marked = MarkedFolder(self.path.clone());
        self.create()?;
        // Inside, and not beside: the folder may be a mount.
        let files = files::unfinished_folder(self.path.join("output"))?;
        Ok(UnfinishedOutput {
            output: self.clone(),
            files,
            _marked: marked,
        })
    }

    fn mark(&self, files: BTreeSet<PathBuf>) -> Result<()> {
        let program = self.program.to_owned();
        Mark { program, files }.write(&self.path)
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The files of an output folder before they have their places. Dropped, they are removed, and so is the output folder if
/// nothing else is in it and the program has created it.
#[derive(Debug)]
pub struct UnfinishedOutput {
    output: OutputFolder,
    files: UnfinishedFolder,
    // After the files, so that they are removed first.
    _marked: MarkedFolder,
}

/// A folder with a marker file, which is removed on drop if the folder has no other file.
#[derive(Debug)]
struct MarkedFolder(PathBuf);

impl Drop for MarkedFolder {
    fn drop(&mut self) {
        remove_if_only_marked(&self.0);
    }
}

/// Removes the marker file of an output folder that has no other file, and the folder if this process has created it.
pub(crate) fn remove_if_only_marked(folder: &Path) {
    let Ok(mut entries) = fs::read_dir(folder) else {
        return;
    };
    let is_mark = |entry: io::Result<fs::DirEntry>| entry.is_ok_and(|e| e.file_name() == MARK);
    if !entries.next().is_some_and(is_mark) || entries.next().is_some() {
        return;
    }
    // The error that is reported is the one that has ended the program.
    let _removed = fs::remove_file(folder.join(MARK));
    let created = CREATED.lock().unwrap_or_else(PoisonError::into_inner);
    if created.contains(&absolute(folder)) {
        let _removed = fs::remove_dir(folder);
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

impl UnfinishedOutput {
    /// Returns the folder to which the program writes.
    pub fn path(&self) -> &Path {
        self.files.path()
    }

    /// Moves the files into the output folder, in place of those that the program has written there before. Whenever it
    /// is stopped, the folder has all files or lacks the one by which it is recognized as a model or as tokens.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be moved.
    pub fn finish(self) -> Result<()> {
        let (from, to) = (self.path(), self.output.path());
        let mut new = BTreeSet::new();
        list_files(from, Path::new(""), &mut new)?;
        let old = Mark::read(to)?.map_or_else(BTreeSet::new, |mark| mark.files);
        // Whoever removes what a stopped run has left finds all of it.
        self.output.mark(old.union(&new).cloned().collect())?;
        for name in old.iter().chain(&new).filter(|name| is_entrance(name)) {
            remove_file(&to.join(name))?;
        }
        files::sync_folder(to)?;
        for name in old.difference(&new) {
            remove_file(&to.join(name))?;
        }
        let (last, first): (Vec<&PathBuf>, Vec<&PathBuf>) =
            new.iter().partition(|name| is_entrance(name));
        for names in [first, last] {
            for name in names {
                let target = to.join(name);
                let folder = files::folder_of(&target);
                fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))?;
                fs::rename(from.join(name), &target).map_err(Error::io("write", &target))?;
            }
            files::sync_folder(to)?;
        }
        self.output.mark(new)
    }
}

/// Returns `true` for the files by which others recognize a model, an adapter or tokens.
fn is_entrance(name: &Path) -> bool {
    let names = ["config.json", "adapter_config.json"];
    names.iter().any(|entrance| name == Path::new(entrance))
        || name.extension().is_some_and(|end| end == "tokens")
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("replace", path)(error))
        }
        _ => Ok(()),
    }
}

/// Adds the files of `root/folder` and the folders in it, by their paths in `root`.
fn list_files(root: &Path, folder: &Path, found: &mut BTreeSet<PathBuf>) -> Result<()> {
    let path = root.join(folder);
    for entry in fs::read_dir(&path).map_err(Error::io("list", &path))? {
        let entry = entry.map_err(Error::io("list", &path))?;
        let name = folder.join(entry.file_name());
        let kind = entry.file_type().map_err(Error::io("list", &path))?;
        match kind.is_dir() {
            true => list_files(root, &name, found)?,
            false => drop(found.insert(name)),
        }
    }
    Ok(())
}

/// The content of the file [`MARK`].
#[derive(Debug)]
struct Mark {
    program: String,
    files: BTreeSet<PathBuf>,
}

impl Mark {
    fn read(folder: &Path) -> Result<Option<Mark>> {
        let text = text::read_optional(folder.join(MARK))?;
        Ok(text.map(|text| {
            let mut lines = text.lines().map(str::trim);
            let program = lines.next().unwrap_or_default().to_owned();
            // The file could have been edited: only paths in the folder are the program's.
            let is_inside = |path: &Path| {
                let mut parts = path.components();
                parts.all(|part| matches!(part, std::path::Component::Normal(_)))
            };
            let files = lines.filter(|line| !line.is_empty()).map(PathBuf::from);
            Mark {
                program,
                files: files.filter(|path| is_inside(path)).collect(),
            }
        }))
    }

    fn write(&self, folder: &Path) -> Result<()> {
        let mut text = format!("{}\n", self.program);
        for file in &self.files {
            text += &format!("{}\n", file.display());
        }
        files::write(folder.join(MARK), text.as_bytes())
    }
}

/// Checks that the file or folder `path`, which the option `option` gives, is none of the `inputs`, each of which
/// comes with its option.
///
/// # Errors
/// [`Error::InvalidOption`] if it is one of them, under any path.
pub fn check_not_read(option: &'static str, path: &Path, inputs: &[(&str, &Path)]) -> Result<()> {
    match inputs.iter().find(|(_, input)| is_same_file(path, input)) {
        None => Ok(()),
        Some((input, _)) => Err(Error::option(
            option,
            path.display(),
            format!("different from that of `{input}`, which it would overwrite"),
        )),
    }
}

/// Returns `true` if two paths lead to one file or folder, through links, relative parts and mounts.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
        if let (Ok(one), Ok(other)) = (identity(one), identity(other)) {
            return one == other;
        }
    }
    match (fs::canonicalize(one), fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

/// Returns the first file name, in sorted order, in the folder that belongs to a model, an adapter, a run or tokens.
fn foreign_file(folder: &Path) -> Result<Option<String>> {
    if !folder.exists() {
        return Ok(None);
    }
    let mut found: Option<String> = None;
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let name = entry.map_err(Error::io("list", folder))?.file_name();
        let name = name.to_string_lossy().into_owned();
        let extension = Path::new(&name).extension().unwrap_or_default();
        let is_foreign =
            NAMES.contains(&name.as_str()) || EXTENSIONS.iter().any(|known| extension == *known);
        if is_foreign && found.as_ref().is_none_or(|first| name < *first) {
            found = Some(name);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(folder: &Path) -> PathBuf {
        let model = folder.join("model");
        fs::create_dir(&model).expect("made");
        fs::write(model.join("config.json"), "{}").expect("writes");
        model
    }

    #[test]
    fn a_folder_that_is_read_is_refused_by_whatever_path() {
        let folder = tempfile::tempdir().expect("temporary folder");
        // Nothing in it would be overwritten by its name.
        let model = folder.path().join("model");
        fs::create_dir(&model).expect("made");
        let mut paths = vec![
            model.clone(),
            folder.path().join("model/"),
            folder.path().join("model/../model/."),
        ];
        #[cfg(unix)]
        {
            let link = folder.path().join("link");
            std::os::unix::fs::symlink(&model, &link).expect("links");
            paths.push(link);
        }
        for path in paths {
            let inputs = [
                ("--data", Path::new("/nowhere")),
                ("--model", model.as_path()),
            ];
            let error = OutputFolder::check("merge", "--out", &path, &inputs).expect_err("read");
            let expected = "different from that of `--model`, which it would overwrite";
            assert_eq!(
                error.to_string(),
                format!("`--out` is {}; it must be {expected}", path.display())
            );
        }
        // A folder in the model's is another one.
        let inside = model.join("onnx");
        assert!(
            OutputFolder::check("export_onnx", "--out", inside, &[("--model", &model)]).is_ok()
        );
    }

    #[test]
    fn a_folder_that_something_else_wrote_is_refused_and_its_own_is_written_again() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let model = model(folder.path());
        let check = |program, path: &Path| OutputFolder::check(program, "--out", path, &[]);
        let error = check("merge", &model).expect_err("a model").to_string();
        assert!(
            error.ends_with(
                "this one has config.json, which `merge` did not write; choose another or remove it"
            ),
            "{error}"
        );
        assert_eq!(
            fs::read_dir(&model).expect("a folder").count(),
            1,
            "nothing is written"
        );
        let out = folder.path().join("a/out");
        check("merge", &out).expect("new").create().expect("made");
        fs::write(out.join("config.json"), "{}").expect("writes");
        check("merge", &out)
            .expect("its own")
            .create()
            .expect("made");
        let error = check("tokenize", &out).expect_err("another's").to_string();
        assert!(
            error.ends_with("`merge` wrote this one; choose another or remove it"),
            "{error}"
        );
        // Other files are in nobody's way, unless the program names them.
        let notes = folder.path().join("notes");
        fs::create_dir(&notes).expect("made");
        fs::write(notes.join("README.md"), "").expect("writes");
        assert!(check("merge", &notes).is_ok());
        let named = check("merge", &notes)
            .expect("free")
            .also_writes(&["a.csv", "README.md"]);
        assert!(named.is_err());
        for name in ["model-00001-of-00002.safetensors", "a.gguf", "text.tokens"] {
            fs::write(notes.join(name), "").expect("writes");
            assert!(check("merge", &notes).is_err(), "{name}");
            fs::remove_file(notes.join(name)).expect("removes");
        }
        let file = notes.join("README.md");
        let error = check("merge", &file).expect_err("a file").to_string();
        assert!(
            error.ends_with("it must be a folder, but a file of this name exists"),
            "{error}"
        );
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut found = BTreeSet::new();
        list_files(folder, Path::new(""), &mut found).expect("a folder");
        let names = found.iter().filter(|name| *name != Path::new(MARK));
        names.map(|name| name.display().to_string()).collect()
    }

    #[test]
    fn an_output_that_is_written_again_replaces_its_own_files_and_keeps_the_others() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let out = folder.path().join("out");
        let write = |names: &[&str]| {
            let output = OutputFolder::check("merge", "--out", &out, &[]).expect("its own");
            let unfinished = output.begin().expect("made");
            for name in names {
                let path = unfinished.path().join(name);
                fs::create_dir_all(files::folder_of(&path)).expect("made");
                fs::write(path, name).expect("writes");
            }
            unfinished
        };
        let first = [
            "config.json",
            "model-1.safetensors",
            "templates/a.jinja",
            "model.safetensors.index.json",
        ];
        let unfinished = write(&first);
        assert_eq!(
            names(&out).len(),
            first.len(),
            "all are in the unfinished folder"
        );
        assert!(!out.join("config.json").exists());
        unfinished.finish().expect("moves");
        fs::write(out.join("notes.txt"), "mine").expect("writes");
        drop(write(&["config.json", "half.safetensors"]));
        write(&["config.json", "model.safetensors"])
            .finish()
            .expect("moves");
        assert_eq!(
            names(&out),
            ["config.json", "model.safetensors", "notes.txt"]
        );
    }

    #[test]
    fn an_output_that_is_not_finished_leaves_no_folder_with_a_mark_alone() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let begin = |name: &str| {
            let path = folder.path().join(name);
            let output = OutputFolder::check("merge", "--out", &path, &[]).expect("free");
            let unfinished = output.begin().expect("made");
            fs::write(unfinished.path().join("config.json"), "{}").expect("writes");
            (path, unfinished)
        };
        let (new, unfinished) = begin("new");
        assert!(new.join(MARK).exists());
        drop(unfinished);
        assert!(!new.exists());
        // A folder of the user stays, and so do its files.
        for files in [&[][..], &["notes.txt"]] {
            let own = folder.path().join("own");
            fs::create_dir_all(&own).expect("made");
            for name in files {
                fs::write(own.join(name), "mine").expect("writes");
            }
            drop(begin("own"));
            assert_eq!(names(&own), files);
            assert_eq!(own.join(MARK).exists(), !files.is_empty());
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_read_is_refused_under_a_second_name() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (input, output) = (folder.path().join("a.jsonl"), folder.path().join("b.jsonl"));
        fs::write(&input, "").expect("writes");
        let check = || check_not_read("--output", &output, &[("--input", &input)]);
        assert!(check().is_ok());
        fs::hard_link(&input, &output).expect("links");
        assert!(check().is_err());
    }
}
