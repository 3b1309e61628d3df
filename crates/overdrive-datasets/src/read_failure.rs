//! The errors of a disk or of a server below a decoder of another crate, apart from those of damaged data.

#[cfg(any(feature = "parquet", feature = "speech"))]
pub(crate) use noted::{NotedReader, ReadFailure};

/// Returns `true` for an error of the path that a record names, `false` for one of the disk or of the process.
#[cfg(any(feature = "image", feature = "speech"))]
pub(crate) fn is_of_path(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{
        InvalidFilename, InvalidInput, IsADirectory, NotADirectory, NotFound, PermissionDenied,
    };
    [
        InvalidFilename,
        InvalidInput,
        IsADirectory,
        NotADirectory,
        NotFound,
        PermissionDenied,
    ]
    .contains(&error.kind())
}

#[cfg(any(feature = "parquet", feature = "speech"))]
mod noted {
    use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    /// The error of the disk or of the server that a reader met first: a decoder passes on only its text, or takes it
    /// for the end of the data.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct ReadFailure(Arc<Mutex<Option<io::Error>>>);

    impl ReadFailure {
        fn lock(&self) -> MutexGuard<'_, Option<io::Error>> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn take(&self) -> Option<io::Error> {
            self.lock().take()
        }

        /// Keeps an error, and returns one with its text.
        pub(crate) fn note(&self, error: io::Error) -> io::Error {
            let copy = io::Error::new(error.kind(), error.to_string());
            // An interrupted read is repeated; a place beyond the end, or any file's, is that of damaged metadata.
            use ErrorKind::{Interrupted, InvalidInput, UnexpectedEof};
            if ![Interrupted, InvalidInput, UnexpectedEof].contains(&error.kind()) {
                self.lock().get_or_insert(error);
            }
            copy
        }
    }

    /// A reader whose errors are noted.
    pub(crate) struct NotedReader<R> {
        pub(crate) reader: R,
        pub(crate) failure: ReadFailure,
    }

    impl<R: Read> Read for NotedReader<R> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let read = self.reader.read(out);
            read.map_err(|error| self.failure.note(error))
        }
    }

    impl<R: Seek> Seek for NotedReader<R> {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            let place = self.reader.seek(to);
            place.map_err(|error| self.failure.note(error))
        }
    }
}
