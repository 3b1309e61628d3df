//! Unfinished files and folders: their names, and the removal of those that nobody finishes any more.
//!
//! Their names are `.NAME.overdrive-SYSTEM-PROCESS-RANDOM.tmp`: the file that they become, the running system, the
//! process. The process holds a lock on each, which the system releases however the process ends. So the next process
//! that writes into the folder removes what an ended one has left, and never what a live one is writing.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirEntry, File, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use tempfile::{Builder, NamedTempFile, TempDir};

use crate::files::folder_of;
use crate::output::remove_if_only_marked;
use crate::{Error, Result};

const MARK: &str = ".overdrive-";
const END: &str = ".tmp";
/// The number of hexadecimal digits of the system and of the process in a name.
const DIGITS: usize = 8;

/// The age from which something unfinished is a leftover if its lock says nothing, because another machine made it or
/// the file system has no locks: nothing is written for so long without a pause.
const LEFTOVER_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The folders in which this process has made something unfinished.
static FOLDERS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// An unfinished folder, which is removed when it is dropped, unless it is kept.
#[derive(Debug)]
pub struct UnfinishedFolder {
    folder: TempDir,
    /// Its lock, if the system locks folders.
    _lock: Option<File>,
}

impl UnfinishedFolder {
    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Keeps the folder, which has been renamed.
    pub fn keep(self) {
        let _renamed = self.folder.keep();
    }
}

/// Creates an unfinished file for `path`, with the usual permissions. It is removed when it is dropped. The first time
/// that this process writes into the folder, what ended processes have left there is removed.
///
/// # Errors
/// [`Error::Io`] with `path`.
pub fn unfinished(path: impl AsRef<Path>) -> Result<NamedTempFile> {
    let path = path.as_ref();
    if register(folder_of(path)) {
        remove_leftovers(folder_of(path));
    }
    let create = || loop {
        let mut builder = Builder::new();
        let beginning = beginning(path)?;
        builder.prefix(&beginning).suffix(END);
        // By default only the owner could read it. The umask of the process still applies.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder.tempfile_in(folder_of(path))?;
        if claim(file.as_file(), file.path()) {
            return Ok(file);
        }
    };
    create().map_err(Error::io("write", path))
}

/// Creates an unfinished folder for `path`, as [`unfinished`] creates a file. What ended processes have left beside it
/// is removed each time.
///
/// # Errors
/// [`Error::Io`] with `path`.
pub fn unfinished_folder(path: impl AsRef<Path>) -> Result<UnfinishedFolder> {
    let path = path.as_ref();
    register(folder_of(path));
    remove_leftovers(folder_of(path));
    let create = || loop {
        let mut builder = Builder::new();
        let beginning = beginning(path)?;
        builder.prefix(&beginning).suffix(END);
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        let folder = builder.tempdir_in(folder_of(path))?;
        // Only Unix opens folders. A folder that cannot be opened is recognized by its age.
        let lock = match File::open(folder.path()) {
            // Another process has taken it for a leftover.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened.ok().filter(|_| cfg!(unix)),
        };
        if lock.as_ref().is_none_or(|lock| claim(lock, folder.path())) {
            return Ok(UnfinishedFolder {
                folder,
                _lock: lock,
            });
        }
    };
    create().map_err(Error::io("create the folder", path))
}

/// Returns `true` if `name` is that of an unfinished file or folder for `path`.
pub fn is_unfinished(name: &OsStr, path: &Path) -> bool {
    let mut begins = OsString::from(".");
    begins.push(path.file_name().unwrap_or_default());
    let name = name.as_encoded_bytes();
    let rest = name.strip_prefix(begins.as_encoded_bytes());
    rest.is_some_and(|rest| rest.starts_with(MARK.as_bytes())) && makers(name).is_some()
}

/// Removes all unfinished files and folders of this process, which a signal ends. Other threads may still write to
/// them; they fail then.
pub fn remove_unfinished() {
    let folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    for folder in folders.iter() {
        remove_own(folder);
        remove_if_only_marked(folder);
    }
}

fn remove_own(folder: &Path) {
    for entry in entries(folder) {
        if makers(entry.file_name().as_encoded_bytes())
            .is_some_and(|(_, process)| process == own_process().as_bytes())
        {
            // Twice: a thread may have added a file to a folder meanwhile.
            remove(&entry);
            remove(&entry);
        }
    }
}

/// Adds a folder to those in which this process has made something unfinished; `true` if it is new.
fn register(folder: &Path) -> bool {
    let path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let mut folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    folders.insert(path)
}

/// Removes what ended processes have left in the folder.
fn remove_leftovers(folder: &Path) {
    for entry in entries(folder) {
        // The lock is held until the entry is gone: another thread or process may be about to claim what it has just
        // made.
        if let Some(_lock) = leftover(&entry) {
            remove(&entry);
        }
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> + use<> {
    // A folder that cannot be listed keeps its leftovers; the operation itself reports what is wrong with it.
    fs::read_dir(folder).into_iter().flatten().flatten()
}

fn remove(entry: &DirEntry) {
    // What cannot be removed only takes space, so it is not an error.
    let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
    let _removed = match is_folder {
        true => fs::remove_dir_all(entry.path()),
        false => fs::remove_file(entry.path()),
    };
}

/// Returns the lock of a leftover, `None` in it if the age tells one; `None` for anything else.
fn leftover(entry: &DirEntry) -> Option<Option<File>> {
    let name = entry.file_name();
    let (system, process) = makers(name.as_encoded_bytes())?;
    // On some network file systems a lock excludes only the processes of this machine.
    let is_local = system_id().is_some_and(|own| own.as_bytes() == system);
    if is_local && cfg!(unix) {
        match File::open(entry.path()).map(|file| (file.try_lock(), file)) {
            Ok((Ok(()), held)) => return Some(Some(held)),
            Ok((Err(TryLockError::WouldBlock), _)) => return None,
            Ok((Err(TryLockError::Error(_)), _)) | Err(_) => {}
        }
    }
    let is_own = process == own_process().as_bytes();
    let is_old = |written: SystemTime| {
        let age = written.elapsed();
        age.is_ok_and(|since_then| since_then >= LEFTOVER_AGE)
    };
    (!is_own && last_written(entry).is_some_and(is_old)).then_some(None)
}

/// Returns the last time at which a file was written, or a folder or a file in it.
fn last_written(entry: &DirEntry) -> Option<SystemTime> {
    let written = |entry: &DirEntry| entry.metadata().and_then(|found| found.modified()).ok();
    let inside = entries(&entry.path())
        .filter_map(|inside| written(&inside))
        .max();
    written(entry).max(inside)
}

/// Locks what this process has just made; `false` if another process takes it for a leftover and removes it.
fn claim(file: &File, path: &Path) -> bool {
    if cfg!(not(unix)) {
        return true;
    }
    match file.try_lock() {
        Ok(()) => {
            let found = fs::symlink_metadata(path);
            !found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        }
        Err(TryLockError::WouldBlock) => false,
        // A file system without locks: the age decides.
        Err(TryLockError::Error(_)) => true,
    }
}

/// Returns the beginning of the names of what this process makes for `path`.
fn beginning(path: &Path) -> io::Result<OsString> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    let system = system_id().unwrap_or("00000000");
    hidden.push(format!("{MARK}{system}-{}-", own_process()));
    Ok(hidden)
}

/// Returns the system and the process in the name of something unfinished.
fn makers(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let name = name.strip_prefix(b".")?.strip_suffix(END.as_bytes())?;
    let at = name
        .windows(MARK.len())
        .rposition(|part| part == MARK.as_bytes())?;
    let tag = &name[at + MARK.len()..];
    let (system, rest) = (tag.get(..DIGITS)?, tag.get(DIGITS..)?.strip_prefix(b"-")?);
    let (process, rest) = (rest.get(..DIGITS)?, rest.get(DIGITS..)?.strip_prefix(b"-")?);
    let is_hex = |part: &[u8]| part.iter().all(u8::is_ascii_hexdigit);
    (is_hex(system) && is_hex(process) && !rest.is_empty()).then_some((system, process))
}

/// Returns a number that no other process has, the processes of other containers and machines included.
fn own_process() -> &'static str {
    static OWN: OnceLock<String> = OnceLock::new();
    OWN.get_or_init(|| {
        let number = RandomState::new().hash_one(std::process::id());
        format!("{:0DIGITS$x}", number & 0xffff_ffff)
    })
}

/// Returns a number of the running system, which all its containers share; `None` where it has none.
pub(crate) fn system_id() -> Option<&'static str> {
    static SYSTEM: OnceLock<Option<String>> = OnceLock::new();
    let system = SYSTEM.get_or_init(|| {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let id = id.get(..DIGITS)?;
        id.bytes()
            .all(|byte| byte.is_ascii_hexdigit())
            .then(|| id.to_owned())
    });
    system.as_deref()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(folder).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        names.collect()
    }

    /// Returns the name that another process would have given to something for `name`.
    fn name_of_another(name: &str, system: &str) -> String {
        format!(".{name}{MARK}{system}-0123abcd-x8sQ1z{END}")
    }

    #[test]
    fn an_unfinished_file_is_found_by_its_name_and_removed_when_it_is_dropped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("a.json");
        let (one, other) = (unfinished(&path), unfinished(&path));
        let (one, other) = (one.expect("made"), other.expect("made"));
        assert_ne!(one.path(), other.path());
        for name in names(folder.path()) {
            assert!(is_unfinished(&name, &path), "{name:?}");
            assert!(!is_unfinished(&name, &folder.path().join("b.json")));
        }
        assert!(!is_unfinished(OsStr::new("a.json"), &path));
        drop((one, other));
        let made = unfinished_folder(&path).expect("made");
        assert!(is_unfinished(
            made.path().file_name().expect("a name"),
            &path
        ));
        drop(made);
        assert!(names(folder.path()).is_empty());
    }

    /// A folder exists for a moment before its lock is taken, in which another thread may take it for a leftover.
    #[test]
    fn folders_that_several_threads_make_at_once_stay_until_they_are_dropped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("sample");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let made = unfinished_folder(&path).expect("made");
                        fs::write(made.path().join("a.jsonl"), "{}").expect("the folder exists");
                    }
                });
            }
        });
        assert!(names(folder.path()).is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_ended_processes_left_is_removed_and_what_live_ones_write_stays() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let system = system_id().expect("Linux has one");
        let at = |name: &str| folder.path().join(name);
        let (dead, live) = (
            at(&name_of_another("dead.bin", system)),
            at(&name_of_another("live.bin", system)),
        );
        fs::write(&dead, "half").expect("writes");
        fs::write(&live, "half").expect("writes");
        let dead_folder = at(&name_of_another("dead", system));
        let live_folder = at(&name_of_another("live", system));
        for made in [&dead_folder, &live_folder] {
            fs::create_dir(made).expect("made");
            fs::write(made.join("model.safetensors"), "half").expect("writes");
        }
        let hold = |path: &Path| {
            let file = File::open(path).expect("opens");
            file.try_lock().expect("free");
            file
        };
        let _held = [hold(&live), hold(&live_folder)];
        // Files of other machines are leftovers after a day, and others' files are none.
        let other = at(&name_of_another("other.bin", "ffffffff"));
        let old = at(&name_of_another("old.bin", "ffffffff"));
        let foreign = at(".foreign.x8sQ1z.tmp");
        for path in [&other, &old, &foreign] {
            fs::write(path, "half").expect("writes");
        }
        for path in [&old, &foreign] {
            let file = File::options().write(true).open(path).expect("opens");
            let two_days_ago = SystemTime::now() - 2 * LEFTOVER_AGE;
            file.set_modified(two_days_ago).expect("sets");
        }

        // The file that is written has another name than any of them.
        drop(unfinished(at("new.bin")).expect("made"));

        let left = [&live, &live_folder, &other, &foreign];
        for path in left {
            assert!(path.exists(), "{}", path.display());
        }
        assert_eq!(names(folder.path()).len(), left.len());
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_an_unfinished_folder_as_far_as_the_umask_allows() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("temporary folder");
        let usual = folder.path().join("usual");
        fs::create_dir(&usual).expect("made");
        let made = unfinished_folder(folder.path().join("a")).expect("made");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode();
        assert_eq!(mode(made.path()), mode(&usual));
    }

    #[test]
    fn a_signal_removes_all_that_this_process_has_not_finished() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("a.bin");
        let file = unfinished(&path).expect("made");
        let made = unfinished_folder(folder.path().join("model")).expect("made");
        fs::create_dir(made.path().join("inside")).expect("made");
        fs::write(made.path().join("inside/b.bin"), "half").expect("writes");
        let another = folder.path().join(name_of_another("c.bin", "00000000"));
        fs::write(&another, "half").expect("writes");
        remove_own(folder.path());
        assert_eq!(names(folder.path()), [another.file_name().expect("a name")]);
        drop((file, made));
    }
}
