//! A file of records that can be appended to again after a full disk.

use std::fs::File;
use std::io::{self, ErrorKind, Write};

/// The largest number of bytes that wait for space on the disk: days of metrics, and little of a run's memory.
const MAX_WAITING: usize = 64 << 20;

/// A file to which records are appended. A record that cannot be written waits in memory and is written before the
/// next one, from the byte where the disk became full, so that the file has no gaps and no duplicate records.
#[derive(Debug)]
pub(crate) struct AppendFile<W = File> {
    out: W,
    /// The bytes that are still to be written. They may begin in the middle of a partly written record.
    waiting: Vec<u8>,
    /// The number of bytes that were written or wait.
    #[cfg_attr(
        not(feature = "wandb"),
        allow(dead_code, reason = "only the W&B file asks for it")
    )]
    taken: u64,
}

impl<W: Write> AppendFile<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            waiting: Vec::new(),
            taken: 0,
        }
    }

    /// Returns the number of bytes that [`append`](Self::append) has taken: written, or waiting.
    #[cfg(feature = "wandb")]
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Appends a record in one write, together with any records that wait after an earlier failure.
    ///
    /// # Errors
    /// An I/O error. The record then waits, or is lost if too many bytes are already waiting.
    pub(crate) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.waiting.len() > MAX_WAITING {
            self.write_waiting()?;
        }
        self.waiting.extend_from_slice(record);
        self.taken += record.len() as u64;
        self.write_waiting()
    }

    /// Writes the waiting bytes.
    pub(crate) fn write_waiting(&mut self) -> io::Result<()> {
        let mut written = 0;
        let outcome = loop {
            let rest = &self.waiting[written..];
            if rest.is_empty() {
                break Ok(());
            }
            match self.out.write(rest) {
                Ok(0) => break Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.waiting.drain(..written);
        outcome
    }
}

impl AppendFile {
    /// Writes the waiting bytes, and flushes the file to disk.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        self.write_waiting()?;
        self.out.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for a number of bytes, which takes at most three at a time.
    #[derive(Default)]
    struct Disk {
        bytes: Vec<u8>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room).min(3);
            if taken == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.bytes.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn records_that_found_no_room_follow_when_there_is_some() {
        let records = ["first\n", "second\n", "third\n", "fourth\n"];
        let whole = records.concat().into_bytes();
        for room in 0..whole.len() {
            let mut file = AppendFile::new(Disk {
                room,
                ..Disk::default()
            });
            let failed = records.map(|record| file.append(record.as_bytes()).is_err());
            assert!(failed[3], "room for {room} bytes is not enough for all");
            assert_eq!(file.out.bytes, whole[..room], "all that fits, and no more");
            file.out.room = usize::MAX;
            file.append(b"fifth\n").expect("there is room");
            assert_eq!(file.out.bytes, [&whole[..], b"fifth\n"].concat());
        }
    }

    #[test]
    fn the_bytes_that_wait_are_bounded() {
        let mut file = AppendFile::new(Disk::default());
        let record = vec![b'x'; 8 << 20];
        for _ in 0..20 {
            assert!(file.append(&record).is_err());
        }
        assert_eq!(file.waiting.len(), MAX_WAITING + record.len());
    }
}
