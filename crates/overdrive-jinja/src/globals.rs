//! The global functions and classes of templates.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use jiff::Zoned;
use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};

use crate::args::{Args, int, text};
use crate::error::{Error, ErrorKind, Result};
use crate::limits::{MAX_RANGE, check_names};
use crate::objects::Object;
use crate::operators::range;
use crate::runtime::Runtime;
use crate::value::{Shape, Value};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Global {
    Range,
    Dict,
    Cycler,
    Joiner,
    Namespace,
    RaiseException,
    StrftimeNow,
}

impl Global {
    /// Returns the global of a name.
    pub(crate) fn named(name: &str) -> Option<Global> {
        Some(match name {
            "range" => Global::Range,
            "dict" => Global::Dict,
            "cycler" => Global::Cycler,
            "joiner" => Global::Joiner,
            "namespace" => Global::Namespace,
            "raise_exception" => Global::RaiseException,
            "strftime_now" => Global::StrftimeNow,
            _ => return None,
        })
    }

    pub(crate) fn type_name(self) -> &'static str {
        match self {
            Global::Range | Global::RaiseException | Global::StrftimeNow => "function",
            _ => "type",
        }
    }

    pub(crate) fn repr(self) -> &'static str {
        match self {
            Global::Dict => "<class 'dict'>",
            Global::Cycler => "<class 'jinja2.utils.Cycler'>",
            Global::Joiner => "<class 'jinja2.utils.Joiner'>",
            Global::Namespace => "<class 'jinja2.utils.Namespace'>",
            Global::Range => "<function safe_range>",
            Global::RaiseException => "<function raise_exception>",
            Global::StrftimeNow => "<function strftime_now>",
        }
    }

    pub(crate) fn call(self, runtime: &mut Runtime, args: Args) -> Result<Value> {
        match self {
            Global::Range => {
                let [first, second, step] = args.unnamed("range", 1)?;
                let first = int(&first.unwrap_or(Value::None))?;
                let (start, stop) = match second {
                    None => (0, first),
                    Some(stop) => (first, int(&stop)?),
                };
                let step = step.map_or(Ok(1), |step| int(&step))?;
                if step == 0 {
                    return Err(Error::value("range() arg 3 must not be zero"));
                }
                let range = range(start, stop, step);
                if range.length > MAX_RANGE {
                    return Err(Error::new(
                        ErrorKind::Overflow,
                        format!("a range of more than {MAX_RANGE} numbers is refused"),
                    ));
                }
                Ok(Value::Range(Rc::new(range)))
            }
            Global::Dict => Value::dict(pairs(runtime, args)?),
            Global::Cycler => {
                if !args.named.is_empty() {
                    return Err(Error::type_error("cycler has no named parameters"));
                }
                if args.positional.is_empty() {
                    return Err(Error::runtime("at least one item has to be provided"));
                }
                let shape = Shape::of(&args.positional)?;
                Ok(Value::Object(Rc::new(Object::Cycler {
                    items: args.positional,
                    at: Cell::new(0),
                    shape,
                })))
            }
            Global::Joiner => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                Ok(Value::Object(Rc::new(Object::Joiner {
                    separator: separator.unwrap_or_else(|| Value::from(", ")),
                    is_used: Cell::new(false),
                })))
            }
            Global::Namespace => {
                let mut attributes: Vec<(Arc<str>, Value)> = Vec::new();
                let pairs = pairs(runtime, args)?;
                check_names(pairs.len())?;
                for (key, value) in pairs {
                    let key = key.to_text()?;
                    crate::objects::refuse_mutable(
                        std::slice::from_ref(&value),
                        "assigned to an attribute of a namespace",
                    )?;
                    attributes.retain(|(known, _)| *known != key);
                    attributes.push((key, value));
                }
                Ok(Value::Object(Rc::new(Object::Namespace(RefCell::new(
                    attributes,
                )))))
            }
            Global::RaiseException => {
                let [message] = args.bind("raise_exception", ["message"], 1)?;
                let message = message.unwrap_or(Value::None).to_text()?;
                Err(Error::new(ErrorKind::Raised, &*message))
            }
            Global::StrftimeNow => {
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                strftime_now(text(&format.unwrap_or(Value::None))?).map(Value::from)
            }
        }
    }
}

/// Returns the pairs of `dict(mapping_or_pairs, **named)`.
fn pairs(runtime: &mut Runtime, args: Args) -> Result<Vec<(Value, Value)>> {
    let mut pairs = Vec::new();
    let mut positional = args.positional.into_iter();
    match (positional.next(), positional.next()) {
        (None, _) => {}
        (Some(_), Some(_)) => {
            return Err(Error::type_error("dict expected at most 1 argument"));
        }
        (Some(Value::Dict(dict)), None) => pairs.extend(dict.entries.iter().cloned()),
        (Some(items), None) => {
            items.check_defined()?;
            for pair in runtime.collect(&items)? {
                match <[Value; 2]>::try_from(runtime.collect(&pair)?) {
                    Ok([key, value]) => pairs.push((key, value)),
                    Err(_) => {
                        let detail = "a dictionary is made of pairs of a key and a value";
                        return Err(Error::value(detail));
                    }
                }
            }
        }
    }
    let named = args.named.into_iter();
    pairs.extend(named.map(|(name, value)| (Value::from(name), value)));
    runtime.reserve(pairs.len())?;
    Ok(pairs)
}

/// Returns the local time in a format of Python's `strftime`, in the C locale. As in transformers, the time does not have
/// a time zone, so the directives of time zones stand for nothing.
fn strftime_now(format: &str) -> Result<String> {
    let time = Zoned::now();
    // Directives that are not known stay as they are, as in glibc.
    let config = Config::new().custom(PosixCustom::new()).lenient(true);
    // Python has six digits of a second; jiff leaves out zeros at the end.
    let microseconds = format!("{:06}", time.subsec_nanosecond() / 1000);
    let parts: Vec<String> = format
        .split("%%")
        .map(|part| {
            ["%z", "%:z", "%Z"]
                .iter()
                .fold(part.replace("%f", &microseconds), |part, zone| {
                    part.replace(zone, "")
                })
        })
        .collect();
    BrokenDownTime::from(&time)
        .to_string_with_config(&config, parts.join("%%"))
        .map_err(|error| Error::value(format!("strftime_now: {error}")))
}
