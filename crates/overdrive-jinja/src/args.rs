use std::rc::Rc;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::value::Value;

/// The arguments of a call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Value>,
    pub(crate) named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// Returns an argument for each parameter, or `None` where an optional one is not given. The first `required`
    /// parameters are not optional.
    pub(crate) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&'static str; N],
        required: usize,
    ) -> Result<[Option<Value>; N]> {
        let given = self.positional.len();
        if given > N {
            return Err(Error::type_error(format!(
                "{function} takes at most {N} arguments ({given} given)"
            )));
        }
        let mut bound = [const { None }; N];
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            let Some(at) = names.iter().position(|known| **known == *name) else {
                return Err(Error::type_error(format!(
                    "{function} has no parameter named {name:?}"
                )));
            };
            if bound[at].is_some() {
                return Err(Error::type_error(format!(
                    "{function} got two values for {name:?}"
                )));
            }
            bound[at] = Some(value);
        }
        match bound[..required].iter().position(Option::is_none) {
            None => Ok(bound),
            Some(missing) => Err(Error::type_error(format!(
                "{function} needs the argument {:?}",
                names[missing]
            ))),
        }
    }

    /// Returns the arguments of a function whose parameters are positional only.
    pub(crate) fn unnamed<const N: usize>(
        self,
        function: &str,
        required: usize,
    ) -> Result<[Option<Value>; N]> {
        // No argument has an empty name.
        self.bind(function, [""; N], required)
    }

    /// Returns an error if there is any argument.
    pub(crate) fn none(self, function: &str) -> Result<()> {
        let [] = self.unnamed::<0>(function, 0)?;
        Ok(())
    }
}

/// Returns an argument that must be an integer.
pub(crate) fn int(value: &Value) -> Result<i128> {
    value.check_defined()?;
    value.as_int().ok_or_else(|| {
        Error::type_error(format!(
            "'{}' object cannot be interpreted as an integer",
            value.type_name()
        ))
    })
}

/// Returns an argument that must be a string.
pub(crate) fn text(value: &Value) -> Result<&str> {
    value.check_defined()?;
    value.as_str().ok_or_else(|| {
        Error::type_error(format!("a string is expected, not '{}'", value.type_name()))
    })
}

/// Returns an optional argument, for which `none` counts as not given.
pub(crate) fn given(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_none())
}

/// Returns an optional integer.
pub(crate) fn int_or(value: Option<Value>, default: i128) -> Result<i128> {
    value.as_ref().map_or(Ok(default), int)
}

/// Returns the truth value of an optional argument.
pub(crate) fn bool_or(value: Option<Value>, default: bool) -> bool {
    value.map_or(default, |value| value.is_true())
}

/// Returns an optional flag of a CPython function that also accepts an integer.
pub(crate) fn flag_or(value: Option<Value>, default: bool) -> Result<bool> {
    Ok(int_or(value, i128::from(default))? != 0)
}

/// Returns an optional string.
pub(crate) fn text_or(value: Option<Value>, default: &str) -> Result<Rc<str>> {
    value.as_ref().map_or(Ok(default), text).map(Rc::from)
}

/// Returns the position of an optional index in `length` elements; a negative index counts from the end.
pub(crate) fn position_or(value: Option<Value>, default: i128, length: i128) -> Result<i128> {
    Ok(match int_or(value, default)? {
        at if at < 0 => at.saturating_add(length).max(0),
        at => at,
    })
}
