//! libtorch as PyTorch's own site gives it out: one zip.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use overdrive_build::TORCH_VERSION;

use super::{Platform, Refusal};
use crate::failure::Failure;
use crate::progress;

/// A quick no is better than a slow one: there is another source.
const CONNECT: Duration = Duration::from_secs(5);
/// Longer than a stall that ends by itself.
const SILENCE: Duration = Duration::from_secs(60);
/// A long download over a bad line breaks off more than once.
const ATTEMPTS: u32 = 5;

/// The address of the official CPU archive; `None` where there is none (Linux on Arm).
pub(crate) fn url(platform: Platform) -> Option<String> {
    let base = "https://download.pytorch.org/libtorch/cpu";
    match platform {
        Platform::LinuxX86 => Some(format!(
            "{base}/libtorch-shared-with-deps-{TORCH_VERSION}%2Bcpu.zip"
        )),
        Platform::MacArm => Some(format!("{base}/libtorch-macos-arm64-{TORCH_VERSION}.zip")),
        Platform::LinuxArm => None,
    }
}

/// Downloads `url` into `downloads`; goes on where a killed run stopped.
///
/// PyTorch publishes no hashes for these archives, and none could be computed where this was
/// written, because the site was out of reach there. What guards them is TLS, the checksum that
/// the zip holds for each file (checked while unpacking), and the version it says it is.
pub(crate) fn fetch(url: &str, downloads: &Path) -> Result<PathBuf, Refusal> {
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
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_resolve(Some(CONNECT))
        .timeout_connect(Some(CONNECT))
        .timeout_recv_response(Some(SILENCE))
        .timeout_per_read(Some(SILENCE))
        .http_status_as_error(false)
        .build()
        .into();
    let mut broken = String::new();
    for attempt in 1..=ATTEMPTS {
        match go_on(&agent, url, &part)? {
            Progress::Done => {
                fs::rename(&part, &whole).map_err(|error| {
                    Failure::io("could not move the archive to", &whole, &error)
                })?;
                return Ok(whole);
            }
            Progress::Unreachable(reason) if attempt == 1 => {
                return Err(Refusal::Unavailable(reason));
            }
            Progress::Unreachable(reason) | Progress::Broken(reason) => {
                eprintln!("  the download broke off ({reason}); going on where it stopped");
                broken = reason;
                std::thread::sleep(Duration::from_secs(u64::from(attempt)));
            }
        }
    }
    Err(Refusal::Unavailable(format!(
        "the download broke off {ATTEMPTS} times, last: {broken}"
    )))
}

/// How one request ended.
enum Progress {
    Done,
    /// No answer, or not the file.
    Unreachable(String),
    /// Some of it came.
    Broken(String),
}

fn go_on(agent: &ureq::Agent, url: &str, part: &Path) -> Result<Progress, Failure> {
    let have = fs::metadata(part).map_or(0, |metadata| metadata.len());
    // A part is only good together with the rest of the same file.
    let tag_file = part.with_extension("part.etag");
    let tag = fs::read_to_string(&tag_file).unwrap_or_default();
    let mut request = agent.get(url);
    if have > 0 && !tag.is_empty() {
        request = request
            .header("Range", format!("bytes={have}-"))
            .header("If-Range", &tag);
    }
    let mut response = match request.call() {
        Ok(response) => response,
        Err(error) => return Ok(Progress::Unreachable(error.to_string())),
    };
    let status = response.status().as_u16();
    let header = |name: &str| {
        response
            .headers()
            .get(name)?
            .to_str()
            .ok()
            .map(str::to_owned)
    };
    let appends = match status {
        206 => true,
        200 => false,
        // Nothing after what we have: it is whole, or it is not the same file; ask from the start.
        416 => {
            let _ = fs::remove_file(part);
            return Ok(Progress::Broken(
                "the part does not fit the file".to_owned(),
            ));
        }
        _ => {
            return Ok(Progress::Unreachable(format!(
                "the server answered {status}"
            )));
        }
    };
    let start = if appends { have } else { 0 };
    let length: Option<u64> = header("content-length").and_then(|text| text.parse().ok());
    let strong_tag = header("etag").filter(|tag| !tag.starts_with("W/"));
    let fail = |error: io::Error| Failure::io("could not write", part, &error);
    fs::write(&tag_file, strong_tag.unwrap_or_default()).map_err(fail)?;
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .append(appends)
        .truncate(!appends)
        .open(part)
        .map_err(fail)?;
    let total = start + length.unwrap_or(0);
    let bar = progress::bytes(total, "downloading");
    bar.set_position(start);
    let copied = copy(&mut response.body_mut().as_reader(), &mut file, &bar).map_err(fail)?;
    bar.finish_and_clear();
    match copied {
        Err(reason) => Ok(Progress::Broken(reason)),
        Ok(bytes) if length.is_some_and(|length| bytes < length) => Ok(Progress::Broken(
            "the connection was closed early".to_owned(),
        )),
        Ok(_) => {
            file.sync_all().map_err(fail)?;
            let _ = fs::remove_file(&tag_file);
            Ok(Progress::Done)
        }
    }
}

/// Errors of reading are the network's and come inside; those of writing are the disk's.
fn copy(
    from: &mut dyn Read,
    to: &mut File,
    bar: &indicatif::ProgressBar,
) -> io::Result<Result<u64, String>> {
    let mut buffer = vec![0; 1 << 18];
    let mut copied = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(Ok(copied)),
            Ok(read) => {
                to.write_all(&buffer[..read])?;
                copied += read as u64;
                bar.inc(read as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(Err(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    /// Serves `body`, each connection `cut` bytes at most, and tells the ranges asked for.
    fn serve(body: &'static [u8], cut: usize) -> (String, mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/file%2Bcpu.zip", listener.local_addr().unwrap());
        let (tell, asked) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut range = String::new();
                for line in BufReader::new(&stream).lines() {
                    let line = line.unwrap().to_lowercase();
                    if let Some(value) = line.strip_prefix("range: bytes=") {
                        range = value.trim_end_matches('-').to_owned();
                    }
                    if line.is_empty() {
                        break;
                    }
                }
                let start: usize = range.parse().unwrap_or(0);
                let status = if start > 0 {
                    "206 Partial Content"
                } else {
                    "200 OK"
                };
                let rest = &body[start..];
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"one\"\r\nConnection: \
                     close\r\n\r\n",
                    rest.len()
                );
                stream.write_all(head.as_bytes()).unwrap();
                stream.write_all(&rest[..rest.len().min(cut)]).unwrap();
                if tell.send(range).is_err() {
                    return;
                }
            }
        });
        (url, asked)
    }

    const BODY: &[u8] = b"0123456789abcdefghij";

    #[test]
    fn a_download_that_breaks_off_goes_on_where_it_stopped() {
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
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file+cpu.zip.part"), &BODY[..7]).unwrap();
        fs::write(folder.path().join("file+cpu.zip.part.etag"), "\"one\"").unwrap();
        let (url, asked) = serve(BODY, 100);
        assert_eq!(fs::read(fetch(&url, folder.path()).unwrap()).unwrap(), BODY);
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["7"]);
    }

    #[test]
    fn a_part_that_says_not_of_which_file_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file+cpu.zip.part"), "other stuff").unwrap();
        let (url, asked) = serve(BODY, 100);
        assert_eq!(fs::read(fetch(&url, folder.path()).unwrap()).unwrap(), BODY);
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), [""]);
    }

    #[test]
    fn a_site_out_of_reach_is_a_reason_and_no_end() {
        let folder = tempfile::tempdir().unwrap();
        // Bound and dropped: nobody listens there now.
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let refusal = fetch(&format!("http://127.0.0.1:{port}/x.zip"), folder.path()).unwrap_err();
        assert!(matches!(refusal, Refusal::Unavailable(_)), "{refusal:?}");
    }

    #[test]
    fn the_official_archives_are_pinned_to_the_version() {
        assert_eq!(
            url(Platform::LinuxX86).unwrap(),
            "https://download.pytorch.org/libtorch/cpu/\
             libtorch-shared-with-deps-2.11.0%2Bcpu.zip"
        );
        assert_eq!(url(Platform::LinuxArm), None);
    }
}
