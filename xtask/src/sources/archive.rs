//! libtorch from PyTorch's own site: one zip archive.
//!
//! It is downloaded by the system's curl and not by a library: curl uses the machine's proxy and certificates,
//! and a TLS stack would be most of what `cargo xtask` has to compile. Without curl the wheels are used.

use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use overdrive_build::Release;

use super::{Platform, SourceError};
use crate::failure::{DISK_FULL, Failure};
use crate::space;

/// The timeout of a connection in seconds. It is short, because there is another source.
const CONNECT_S: &str = "5";
/// The number of seconds without data after which a download counts as broken off.
const SILENCE_S: &str = "60";
/// The number of attempts: a long download over a bad connection breaks off more than once.
const ATTEMPTS: u32 = 5;

/// Returns the address of the official CPU archive; `None` if there is none (Linux on Arm).
pub(crate) fn url(release: Release, platform: Platform) -> Option<String> {
    let version = release.libtorch;
    let base = "https://download.pytorch.org/libtorch/cpu";
    match platform {
        Platform::LinuxX86 => Some(format!(
            "{base}/libtorch-shared-with-deps-{version}%2Bcpu.zip"
        )),
        Platform::MacArm => Some(format!("{base}/libtorch-macos-arm64-{version}.zip")),
        Platform::LinuxArm => None,
    }
}

/// Downloads `url` into `downloads`, and resumes the download of a killed run.
///
/// PyTorch publishes no hashes for these archives, and none could be computed when this was written, because
/// the site was unreachable. The archive is verified by TLS, by the checksum in the zip for each file (checked
/// while unpacking; a part of another archive fails it), and by the version that it contains.
pub(crate) fn fetch(url: &str, downloads: &Path) -> Result<PathBuf, SourceError> {
    let name = url
        .rsplit('/')
        .next()
        .unwrap_or("libtorch.zip")
        .replace("%2B", "+");
    let whole = downloads.join(&name);
    if whole.is_file() {
        return Ok(whole);
    }
    let part = downloads.join(format!("{name}.part"));
    let mut last = String::new();
    for attempt in 1..=ATTEMPTS {
        match run_curl(url, &part)? {
            Outcome::Complete => {
                fs::rename(&part, &whole).map_err(|error| {
                    Failure::io("could not move the archive to", &whole, &error)
                })?;
                return Ok(whole);
            }
            Outcome::Unavailable(reason) => return Err(SourceError::Unavailable(reason)),
            Outcome::BrokeOff(reason) => {
                eprintln!("  the download was interrupted ({reason}); resuming where it stopped");
                last = reason;
            }
            Outcome::NotResumable => {
                eprintln!("  the server cannot resume the partial download; starting again");
                fs::remove_file(&part)
                    .map_err(|error| Failure::io("could not remove", &part, &error))?;
                continue;
            }
        }
        std::thread::sleep(Duration::from_secs(u64::from(attempt - 1)));
    }
    Err(SourceError::Unavailable(format!(
        "the download was interrupted {ATTEMPTS} times; the last time: {last}"
    )))
}

/// The outcome of one run of curl.
#[derive(Debug, PartialEq)]
enum Outcome {
    Complete,
    /// No answer, or not the file.
    Unavailable(String),
    /// A part of the file was received.
    BrokeOff(String),
    /// The download cannot be resumed from the part that is there.
    NotResumable,
}

fn run_curl(url: &str, part: &Path) -> Result<Outcome, Failure> {
    let progress = if std::io::stderr().is_terminal() {
        "--progress-bar"
    } else {
        "--silent"
    };
    let output = Command::new("curl")
        .args(["--fail", "--location", progress, "--continue-at", "-"])
        .args([
            "--connect-timeout",
            CONNECT_S,
            "--speed-limit",
            "1",
            "--speed-time",
            SILENCE_S,
        ])
        .args(["--write-out", "%{http_code}", "--output"])
        .arg(part)
        .arg(url)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            return Ok(Outcome::Unavailable(format!(
                "curl could not be started ({error})"
            )));
        }
    };
    let status = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let outcome = outcome(output.status.code(), &status);
    // Exit code 23: curl could not write, almost always because the disk is full.
    if output.status.code() == Some(23) {
        let free = space::free(part).map_or_else(String::new, |free| {
            format!(" ({} free)", space::megabytes(free))
        });
        let what = format!("curl could not write {}{free}", part.display());
        return Err(Failure::new(what).remedy(DISK_FULL));
    }
    Ok(outcome)
}

/// Returns the meaning of curl's exit code (see `man curl`) and the HTTP status.
fn outcome(code: Option<i32>, status: &str) -> Outcome {
    let unavailable = |reason: &str| Outcome::Unavailable(reason.to_owned());
    match code {
        Some(0) => Outcome::Complete,
        Some(5) => unavailable("the proxy's host name cannot be resolved"),
        Some(6) => unavailable("the server's host name cannot be resolved; is the network up?"),
        Some(7) => unavailable("the server cannot be reached"),
        // 416: there is nothing after the part. (Recent curl takes the part for the complete file and exits
        // with 0; unpacking shows whether it is.)
        Some(22) if status == "416" => Outcome::NotResumable,
        Some(22) => Outcome::Unavailable(format!("the server answered {status}")),
        Some(33 | 36) => Outcome::NotResumable,
        Some(35 | 60) => unavailable("a TLS connection to the server could not be established"),
        // Before there was a status, no server had answered.
        Some(28) if status == "000" => unavailable("the server did not answer in time"),
        Some(code) => Outcome::BrokeOff(format!("curl ended with {code}")),
        None => Outcome::BrokeOff("curl was killed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    /// Serves `body`, at most `cut` bytes per connection, and returns the requested ranges.
    fn serve(body: &'static [u8], cut: usize) -> (String, mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/file%2Bcpu.zip", listener.local_addr().unwrap());
        let (tell, asked) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut range = String::new();
                for line in BufReader::new(&stream).lines() {
                    // A curl that fails closes the connection at any moment.
                    let Ok(line) = line else { break };
                    let line = line.to_lowercase();
                    if let Some(value) = line.strip_prefix("range: bytes=") {
                        range = value.trim_end_matches('-').to_owned();
                    }
                    if line.is_empty() {
                        break;
                    }
                }
                let start: usize = range.parse().unwrap_or(0);
                let rest = body.get(start..).unwrap_or_default();
                let mut head = match start {
                    0 => "HTTP/1.1 200 OK\r\n".to_owned(),
                    _ if rest.is_empty() => "HTTP/1.1 416 Range Not Satisfiable\r\n".to_owned(),
                    _ => format!(
                        "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{}/{}\r\n",
                        body.len() - 1,
                        body.len()
                    ),
                };
                head += &format!(
                    "Content-Length: {}\r\nConnection: close\r\n\r\n",
                    rest.len()
                );
                let _ = stream.write_all(head.as_bytes());
                let _ = stream.write_all(&rest[..rest.len().min(cut)]);
                if tell.send(range).is_err() {
                    return;
                }
            }
        });
        (url, asked)
    }

    /// These tests use the real curl with a server of their own.
    fn no_curl() -> bool {
        let missing = Command::new("curl").arg("--version").output().is_err();
        if missing {
            eprintln!("not run: there is no curl on this machine");
        }
        missing
    }

    const BODY: &[u8] = b"0123456789abcdefghij";

    #[test]
    fn a_download_that_breaks_off_goes_on_where_it_stopped() {
        if no_curl() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (url, asked) = serve(BODY, 12);
        let file = fetch(&url, folder.path()).unwrap();
        assert_eq!(fs::read(&file).unwrap(), BODY);
        assert_eq!(file.file_name().unwrap(), "file+cpu.zip");
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["", "12"]);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "no part is left"
        );
    }

    #[test]
    fn what_a_killed_run_left_is_not_downloaded_again() {
        if no_curl() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file+cpu.zip.part"), &BODY[..7]).unwrap();
        let (url, asked) = serve(BODY, 100);
        assert_eq!(fs::read(fetch(&url, folder.path()).unwrap()).unwrap(), BODY);
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["7"]);
    }

    #[test]
    fn a_run_killed_before_the_renaming_has_lost_nothing() {
        if no_curl() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file+cpu.zip.part"), BODY).unwrap();
        // The server answers 416, which recent versions of curl treat as success and older ones as an error,
        // after which the file is fetched again.
        let (url, asked) = serve(BODY, 100);
        assert_eq!(fs::read(fetch(&url, folder.path()).unwrap()).unwrap(), BODY);
        assert_eq!(asked.try_iter().next().as_deref(), Some("20"));
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn a_fault_in_any_call_of_a_download_leaves_what_the_next_run_completes() {
        use crate::faults::{Fault, under_injection};
        if no_curl() {
            return;
        }
        let name = "sources::archive::tests::\
                    a_fault_in_any_call_of_a_download_leaves_what_the_next_run_completes";
        under_injection(name, |faults| {
            // Both this process and curl are counted.
            let (url, _asked) = serve(BODY, 100);
            for fault in Fault::ALL {
                let calls = faults.every_call(fault, |case| {
                    let (fetched, call) = faults.during(case, || fetch(&url, &case.folder));
                    match fetched {
                        Ok(file) => assert_eq!(fs::read(file).unwrap(), BODY, "{case:?}, {call:?}"),
                        Err(error) => assert!(call.is_some(), "{case:?}: {error:?}"),
                    }
                    let file = fetch(&url, &case.folder).unwrap();
                    assert_eq!(fs::read(file).unwrap(), BODY, "{case:?}, {call:?}");
                    let left = fs::read_dir(&case.folder).unwrap().count();
                    assert_eq!(left, 1, "{case:?}, {call:?}: a part is left");
                });
                assert!(calls > 0, "{fault:?}: no call was seen");
            }
        });
    }

    #[test]
    fn a_site_out_of_reach_is_a_reason_and_no_end() {
        let folder = tempfile::tempdir().unwrap();
        // Bound and dropped: nothing listens on this port any more.
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let refusal = fetch(&format!("http://127.0.0.1:{port}/x.zip"), folder.path()).unwrap_err();
        assert!(
            matches!(refusal, SourceError::Unavailable(_)),
            "{refusal:?}"
        );
    }

    #[test]
    fn the_exit_codes_of_curl_have_words() {
        assert_eq!(outcome(Some(0), "200"), Outcome::Complete);
        assert_eq!(
            outcome(Some(22), "403"),
            Outcome::Unavailable("the server answered 403".to_owned())
        );
        assert_eq!(outcome(Some(22), "416"), Outcome::NotResumable);
        assert!(matches!(outcome(Some(28), "000"), Outcome::Unavailable(_)));
        assert!(matches!(outcome(Some(28), "206"), Outcome::BrokeOff(_)));
        assert!(matches!(outcome(Some(18), "200"), Outcome::BrokeOff(_)));
    }

    #[test]
    fn the_official_archives_are_pinned_to_the_version() {
        assert_eq!(
            url(Release::ALL[0], Platform::LinuxX86).unwrap(),
            "https://download.pytorch.org/libtorch/cpu/\
             libtorch-shared-with-deps-2.11.0%2Bcpu.zip"
        );
        assert_eq!(url(Release::DEFAULT, Platform::LinuxArm), None);
    }
}
