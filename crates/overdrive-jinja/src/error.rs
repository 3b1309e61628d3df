use std::fmt;

/// The kind of an error, named after the exception that Python would raise, because some of them are caught.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The template cannot be parsed.
    Syntax,
    /// An undefined value is used.
    Undefined,
    /// A `TypeError`.
    Type,
    /// A `ValueError`.
    Value,
    /// An `IndexError` or a `KeyError`.
    Lookup,
    /// An `AttributeError`.
    Attribute,
    /// An `OverflowError`, or an integer beyond 128 bits, which Python would hold.
    Overflow,
    /// A `ZeroDivisionError`.
    ZeroDivision,
    /// An error of jinja2, such as `FilterArgumentError` or `SecurityError`.
    Runtime,
    /// The template has called `raise_exception`.
    Raised,
    /// A limit of templates has been reached.
    Limit,
}

/// The reason why a template cannot be parsed or rendered, with its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub(crate) kind: ErrorKind,
    pub(crate) detail: String,
    pub(crate) line: Option<u32>,
}

/// The result of parsing or rendering a template.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, detail: impl Into<String>) -> Error {
        Error {
            kind,
            detail: detail.into(),
            line: None,
        }
    }

    pub(crate) fn syntax(line: u32, detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Syntax, detail).at(line)
    }

    pub(crate) fn type_error(detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Type, detail)
    }

    pub(crate) fn value(detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Value, detail)
    }

    pub(crate) fn lookup(detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Lookup, detail)
    }

    pub(crate) fn limit(detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Limit, detail)
    }

    pub(crate) fn runtime(detail: impl Into<String>) -> Error {
        Error::new(ErrorKind::Runtime, detail)
    }

    /// Returns `true` if the template has called `raise_exception` to refuse its input.
    pub fn is_raised(&self) -> bool {
        self.kind == ErrorKind::Raised
    }

    /// Returns the line of the template where the error was detected, counted from 1.
    pub fn line(&self) -> Option<u32> {
        self.line
    }

    /// Returns the error with a line, unless it has one.
    pub(crate) fn at(mut self, line: u32) -> Error {
        self.line.get_or_insert(line);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The messages of `raise_exception` and of limits need no kind before them.
        let kind = match self.kind {
            ErrorKind::Syntax => "syntax error: ",
            ErrorKind::Undefined => "undefined value: ",
            ErrorKind::Type => "type error: ",
            ErrorKind::Value | ErrorKind::Overflow | ErrorKind::ZeroDivision => "value error: ",
            ErrorKind::Lookup => "lookup error: ",
            ErrorKind::Attribute => "attribute error: ",
            ErrorKind::Runtime => "error: ",
            ErrorKind::Raised | ErrorKind::Limit => "",
        };
        match self.line {
            Some(line) if self.kind != ErrorKind::Raised => {
                write!(f, "line {line}: {kind}{}", self.detail)
            }
            _ => write!(f, "{kind}{}", self.detail),
        }
    }
}

impl std::error::Error for Error {}
