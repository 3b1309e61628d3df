//! A lock between processes.

use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::unfinished::system_id;
use crate::{Error, Result, units};

/// The time that a process waits for a lock without a word: most work under a lock takes less.
const SILENCE: Duration = Duration::from_secs(2);

/// An exclusive lock on a file (`flock`), which the operating system releases however the process ends.
///
/// The file names the process that holds the lock, for the message of those that wait. Some network file systems do not
/// support locks. There the lock excludes no other process, and [`unsupported`](FileLock::unsupported) returns the
/// reason; the caller decides whether to continue without a lock.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
    unsupported: Option<io::Error>,
}

impl FileLock {
    /// Locks the file at `path`, which is created if it is missing. Waits while another process holds the lock; after
    /// two seconds, `report` receives a message with that process, the duration, and the way out. `work` is what is
    /// done under the lock, for that message: "building a.tokens".
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn acquire(
        path: impl AsRef<Path>,
        work: &str,
        report: impl FnOnce(&str),
    ) -> Result<FileLock> {
        let path = path.as_ref();
        let started = Instant::now();
        while started.elapsed() < SILENCE {
            if let Some(lock) = FileLock::try_acquire(path)? {
                return Ok(lock);
            }
            thread::sleep(Duration::from_millis(20));
        }
        report(&waiting_for(path, work));
        let file = open(path)?;
        let locked = file.lock();
        FileLock::from_outcome(file, locked).map_err(Error::io("lock", path))
    }

    /// Locks the file as [`acquire`](FileLock::acquire) does, without waiting: returns `None` while another process
    /// (or another part of this one) holds the lock.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn try_acquire(path: impl AsRef<Path>) -> Result<Option<FileLock>> {
        let path = path.as_ref();
        let file = open(path)?;
        let locked = match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        };
        let lock = FileLock::from_outcome(file, locked).map_err(Error::io("lock", path))?;
        Ok(Some(lock))
    }

    /// Describes the process that holds the lock on `path`, for how long, and how to free it, as the end of a sentence:
    /// "process 12 has held the lock for 3 min; `kill 12` ends it and frees the lock". `None` if it has not written
    /// itself into the file.
    pub fn holder(path: impl AsRef<Path>) -> Option<String> {
        let holder = Holder::read(path.as_ref())?;
        let (who, held, remedy) = holder.describe();
        if holder.is_here() && holder.process == std::process::id() {
            // A program that opens a folder twice must not be told to end itself.
            return Some(format!(
                "this process has held the lock for {held}; drop the value that holds it first"
            ));
        }
        Some(format!("{who} has held the lock for {held}; {remedy}"))
    }

    /// Returns the error of a file system that does not support locks; `None` if the lock is held.
    pub fn unsupported(&self) -> Option<&io::Error> {
        self.unsupported.as_ref()
    }

    fn from_outcome(file: File, locked: io::Result<()>) -> io::Result<FileLock> {
        let unsupported = match locked {
            Ok(()) => {
                // It is only for a message, and the file may be another user's.
                let _written = Holder::this_process().write(&file);
                None
            }
            Err(error) if is_unsupported(&error) => Some(error),
            Err(error) => return Err(error),
        };
        Ok(FileLock {
            _file: file,
            unsupported,
        })
    }
}

fn open(path: &Path) -> Result<File> {
    // For writing: NFS grants an exclusive lock only on such a file.
    let opened = File::options().create(true).append(true).open(path);
    let opened = match opened {
        // Another user's file in a shared folder can be locked if it can be read.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            File::open(path).map_err(|_| error)
        }
        opened => opened,
    };
    opened.map_err(Error::io("lock", path))
}

/// The process that holds a lock, as it has written itself into the file.
#[derive(Debug, PartialEq, Eq)]
struct Holder {
    process: u32,
    /// The time since 1970 at which it took the lock.
    since: Duration,
    /// The system and the namespace in which `process` is its number.
    namespace: String,
    host: String,
}

impl Holder {
    fn this_process() -> Holder {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Holder {
            process: std::process::id(),
            since: now.unwrap_or_default(),
            namespace: namespace(),
            host: fs::read_to_string("/proc/sys/kernel/hostname")
                .map_or_else(|_| String::new(), |host| host.trim().to_owned()),
        }
    }

    fn write(&self, mut file: &File) -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        let Holder {
            process,
            since,
            namespace,
            host,
        } = self;
        // In one call, so that nobody reads half of it.
        let line = format!("{process} {} {namespace} {host}\n", since.as_secs());
        file.write_all(line.as_bytes())
    }

    fn read(path: &Path) -> Option<Holder> {
        let line = fs::read_to_string(path).ok()?;
        let mut fields = line.trim_end().split(' ');
        Some(Holder {
            process: fields.next()?.parse().ok()?,
            since: Duration::from_secs(fields.next()?.parse().ok()?),
            namespace: fields.next()?.to_owned(),
            host: fields.next()?.to_owned(),
        })
    }

    /// Returns the name of the process, the time for which it has held the lock, and the way to free it.
    fn describe(&self) -> (String, String, String) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let held = now.unwrap_or_default().saturating_sub(self.since);
        let held = units::seconds(held.as_secs_f64().max(1.0));
        let Holder { process, host, .. } = self;
        let is_here = self.is_here();
        let place = match is_here {
            true => String::new(),
            false if host.is_empty() => " of another machine or container".to_owned(),
            false => format!(" of {host}"),
        };
        let remedy = if !is_here {
            "ending that process frees the lock".to_owned()
        } else if self.is_stopped() {
            format!(
                "it is stopped: `kill -CONT {process}` resumes it, `kill -KILL {process}` ends it and frees the lock"
            )
        } else {
            format!("`kill {process}` ends it and frees the lock")
        };
        (format!("process {process}{place}"), held, remedy)
    }

    /// Returns `true` if the number of the process means one on this machine.
    fn is_here(&self) -> bool {
        self.namespace == namespace()
    }

    /// Returns `true` if the process is stopped, by Ctrl-Z or a debugger.
    fn is_stopped(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/stat", self.process));
        // The name of the program is in parentheses, and may have any character.
        status.is_ok_and(|status| {
            let state = status.rsplit_once(") ").map(|(_, after)| after);
            state.is_some_and(|state| state.starts_with(['T', 't']))
        })
    }
}

/// Returns the message of a process that waits for the lock.
fn waiting_for(path: &Path, work: &str) -> String {
    let lock = path.display();
    let Some(holder) = Holder::read(path) else {
        return format!("another process is {work}; waiting until it is done (lock {lock})");
    };
    let (who, held, remedy) = holder.describe();
    format!("{who} has been {work} for {held}; waiting until it is done (lock {lock}); {remedy}")
}

/// Returns a name of the system and the namespace in which this process has its number.
fn namespace() -> String {
    let own = fs::read_link("/proc/self/ns/pid");
    // Such as "pid:[4026531836]".
    let own = own.map_or_else(|_| String::new(), |own| own.to_string_lossy().into_owned());
    format!("{}/{own}", system_id().unwrap_or_default())
}

/// Returns `true` for the errors of file systems without locks: ENOSYS (Lustre without `-o flock`), EOPNOTSUPP, and
/// ENOLCK (NFS without a lock service).
fn is_unsupported(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        let codes = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOLCK];
        if Errno::from_io_error(error).is_some_and(|code| codes.contains(&code)) {
            return true;
        }
    }
    error.kind() == io::ErrorKind::Unsupported
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_the_second_until_the_first_is_dropped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("lock");
        let first = FileLock::try_acquire(&path).expect("opens").expect("free");
        assert!(first.unsupported().is_none());
        assert!(FileLock::try_acquire(&path).expect("opens").is_none());
        drop(first);
        assert!(FileLock::try_acquire(&path).expect("opens").is_some());
    }

    #[test]
    fn a_process_that_waits_reports_who_holds_the_lock_and_for_how_long() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("lock");
        let first = FileLock::try_acquire(&path).expect("opens").expect("free");
        let mut holder = Holder::read(&path).expect("written");
        assert_eq!(holder.process, std::process::id());
        let quarter_of_an_hour = Duration::from_secs(15 * 60);
        holder.since -= quarter_of_an_hour;
        let file = open(&path).expect("opens");
        holder.write(&file).expect("writes");
        let (report, reported) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                FileLock::acquire(&path, "building it", |text| {
                    report.send(text.to_owned()).expect("received");
                })
            });
            let text = reported
                .recv_timeout(Duration::from_secs(20))
                .expect("a report");
            drop(first);
            let own = std::process::id();
            for part in [
                format!("process {own} has been building it for 15m"),
                format!("`kill {own}` ends it"),
                path.display().to_string(),
            ] {
                assert!(text.contains(&part), "{text}");
            }
            second.join().expect("no panic").expect("locked");
        });
        // A free lock is taken without a report.
        FileLock::acquire(&path, "building it", |text| panic!("{text}")).expect("free");
        // Of another container, the number means nothing here.
        holder.namespace = "1234abcd/pid:[1]".to_owned();
        holder.host = "node7".to_owned();
        holder.write(&file).expect("writes");
        let text = waiting_for(&path, "building it");
        assert!(
            text.contains("of node7 has been") && !text.contains("kill"),
            "{text}"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_stopped_process_is_recognized() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("started");
        let holder = Holder {
            process: child.id(),
            ..Holder::this_process()
        };
        let is_running = !holder.is_stopped();
        let process = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(process, rustix::process::Signal::STOP).expect("sent");
        let started = Instant::now();
        while !holder.is_stopped() && started.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(1));
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("lock");
        let file = open(&path).expect("opens");
        holder.write(&file).expect("writes");
        let text = waiting_for(&path, "building it");
        child.kill().expect("sent");
        child.wait().expect("ended");
        assert!(is_running);
        let remedy = format!("it is stopped: `kill -CONT {}` resumes it", holder.process);
        assert!(text.contains(&remedy), "{text}");
    }

    #[cfg(unix)]
    #[test]
    fn the_lock_file_of_another_user_is_locked_for_reading() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("lock");
        fs::write(&path, "").expect("writes");
        let set = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode));
        set(0o444).expect("sets");
        let lock = FileLock::try_acquire(&path)
            .expect("readable")
            .expect("free");
        assert!(FileLock::try_acquire(&path).expect("readable").is_none());
        drop(lock);
    }

    #[cfg(unix)]
    #[test]
    fn a_file_system_without_locks_is_told_apart_from_an_error() {
        use rustix::io::Errno;
        for (code, unsupported) in [
            (Errno::NOLCK, true),
            (Errno::OPNOTSUPP, true),
            (Errno::NOSYS, true),
            (Errno::IO, false),
            (Errno::BADF, false),
        ] {
            let file = tempfile::tempfile().expect("temporary file");
            let answer = io::Error::from_raw_os_error(code.raw_os_error());
            let lock = FileLock::from_outcome(file, Err(answer));
            assert_eq!(lock.is_ok(), unsupported, "{code}");
            if let Ok(lock) = lock {
                let reason = lock.unsupported().expect("the answer");
                assert_eq!(reason.raw_os_error(), Some(code.raw_os_error()));
            }
        }
    }
}
