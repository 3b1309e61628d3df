//! Filters that select, sort and group elements.

use std::rc::Rc;

use crate::args::{Args, bool_or, flag_or, given, int, text_or};
use crate::error::{Error, Result};
use crate::limits::check_names;
use crate::runtime::Runtime;
use crate::value::{Elements, Key, Value};
use crate::{filters, predicates};

/// Reads an attribute of elements by its path, such as `function.name` or `0`.
#[derive(Debug, Clone)]
pub(crate) struct Getter {
    parts: Rc<[Value]>,
    default: Option<Value>,
    folds_case: bool,
}

impl Getter {
    pub(crate) fn new(attribute: &Value) -> Result<Getter> {
        Getter::with(Some(attribute.clone()), None, false)
    }

    fn with(attribute: Option<Value>, default: Option<Value>, folds_case: bool) -> Result<Getter> {
        let parts = match given(attribute) {
            None => Vec::new(),
            Some(Value::Str(path)) => {
                check_names(path.text.matches('.').count())?;
                path.text.split('.').map(part).collect::<Result<_>>()?
            }
            Some(other) => vec![other],
        };
        Ok(Getter {
            parts: parts.into(),
            default: given(default),
            folds_case,
        })
    }

    pub(crate) fn get(&self, runtime: &mut Runtime, item: Value) -> Result<Value> {
        let mut item = item;
        for part in &*self.parts {
            item = runtime.item(&item, part)?;
            if let (true, Some(default)) = (item.is_undefined(), &self.default) {
                item = default.clone();
            }
        }
        Ok(match self.folds_case {
            true => lowered(item),
            false => item,
        })
    }
}

fn part(part: &str) -> Result<Value> {
    let is_number = !part.is_empty() && part.chars().all(crate::unicode::is_digit);
    match is_number {
        true => crate::number::parse_int(part, 10).map(Value::Int),
        false => Ok(Value::from(part)),
    }
}

fn lowered(value: Value) -> Value {
    match value {
        Value::Str(text) => text.like(text.text.to_lowercase()),
        other => other,
    }
}

/// Passes a value through one of the filters of this module.
pub(crate) fn call(runtime: &mut Runtime, name: &str, value: Value, args: Args) -> Result<Value> {
    match name {
        "batch" => batch(value, args),
        "slice" => slices(value, args),
        "dictsort" => dict_sort(value, args),
        "groupby" => group_by(runtime, &value, args),
        "map" => map(value, args),
        "max" | "min" => extreme(runtime, &value, args, name == "max"),
        "sort" => sort(runtime, &value, args),
        "unique" => unique(value, args),
        "select" => select(value, args, false, true),
        "selectattr" => select(value, args, true, true),
        "reject" => select(value, args, false, false),
        _ => select(value, args, true, false),
    }
}

/// Returns the elements in reverse order, or an error for a value that Python cannot reverse.
pub(crate) fn reversed_items(runtime: &mut Runtime, value: &Value) -> Result<Vec<Value>> {
    match value {
        Value::Iterator(_) | Value::Object(_) => Err(Error::type_error(format!(
            "'{}' object is not reversible",
            value.type_name()
        ))),
        value => {
            let mut items = runtime.collect(value)?;
            items.reverse();
            Ok(items)
        }
    }
}

/// Implements the filter `reverse`: a string for a string, a list for an iterator, an iterator for other values.
pub(crate) fn reverse(runtime: &mut Runtime, value: &Value) -> Result<Value> {
    let type_name = match value {
        Value::Str(text) => {
            return Ok(text.like(text.text.chars().rev().collect::<String>()));
        }
        Value::Iterator(_) => {
            let mut items = runtime.collect(value)?;
            items.reverse();
            return Value::list(items);
        }
        Value::List(_) => "list_reverseiterator",
        Value::Dict(_) => "dict_reversekeyiterator",
        Value::Range(_) => "range_iterator",
        _ => "reversed",
    };
    let items = Value::list(reversed_items(runtime, value)?)?;
    let mut elements = Elements::new(&items)?;
    Value::lazy(type_name, &[items], move |runtime| elements.next(runtime))
}

/// Returns the elements of a value, of which Python's generators begin to read when they are first read themselves.
fn begun<'e>(elements: &'e mut Option<Elements>, value: &Value) -> Result<&'e mut Elements> {
    match elements {
        Some(elements) => Ok(elements),
        none => Ok(none.insert(Elements::new(value)?)),
    }
}

fn batch(value: Value, args: Args) -> Result<Value> {
    let [count, fill] = args.bind("batch", ["linecount", "fill_with"], 1)?;
    let (count, fill) = (count.unwrap_or(Value::None), given(fill));
    let held = [vec![value.clone()], fill.iter().cloned().collect()].concat();
    let mut elements = None;
    // The first element of the next batch.
    let mut pending: Option<Value> = None;
    Value::lazy("generator", &held, move |runtime| {
        let elements = begun(&mut elements, &value)?;
        let mut items: Vec<Value> = pending.take().into_iter().collect();
        while let Some(item) = elements.next(runtime)? {
            runtime.reserve(1)?;
            if Value::from(items.len()).equals(&count) {
                pending = Some(item);
                return Value::list(items).map(Some);
            }
            items.push(item);
        }
        if items.is_empty() {
            return Ok(None);
        }
        if let Some(fill) = &fill {
            let count = usize::try_from(int(&count)?).unwrap_or(0);
            let missing = count.saturating_sub(items.len());
            runtime.reserve(missing)?;
            items.extend(std::iter::repeat_n(fill.clone(), missing));
        }
        Value::list(items).map(Some)
    })
}

fn slices(value: Value, args: Args) -> Result<Value> {
    let [slices, fill] = args.bind("slice", ["slices", "fill_with"], 1)?;
    let (slices, fill) = (slices.unwrap_or(Value::None), given(fill));
    let held = [vec![value.clone()], fill.iter().cloned().collect()].concat();
    let (mut number, mut offset, mut items) = (0, 0, None);
    Value::lazy("generator", &held, move |runtime| {
        let items = match &mut items {
            Some(items) => items,
            none => none.insert(runtime.collect(&value)?),
        };
        let count = int(&slices)?;
        if count == 0 {
            return Err(Error::value("division by zero"));
        }
        let Ok(count) = usize::try_from(count) else {
            return Ok(None);
        };
        if number >= count {
            return Ok(None);
        }
        let (each, with_extra) = (items.len() / count, items.len() % count);
        let start = offset + number * each;
        if number < with_extra {
            offset += 1;
        }
        let end = offset + (number + 1) * each;
        let mut part = items[start.min(items.len())..end.min(items.len())].to_vec();
        if let Some(fill) = &fill
            && number >= with_extra
        {
            part.push(fill.clone());
        }
        number += 1;
        runtime.reserve(part.len() + 1)?;
        Value::list(part).map(Some)
    })
}

/// Sorts items by their keys as Python's `sorted` does: stably, and with an error for keys that do not compare.
pub(crate) fn sorted<T>(keyed: Vec<(Value, T)>, reverse: bool) -> Result<Vec<T>> {
    fn merge<T>(mut items: Vec<(Value, T)>, reverse: bool) -> Result<Vec<(Value, T)>> {
        if items.len() < 2 {
            return Ok(items);
        }
        let right = merge(items.split_off(items.len() / 2), reverse)?;
        let left = merge(items, reverse)?;
        let mut merged = Vec::with_capacity(left.len() + right.len());
        let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let right_first = match reverse {
                true => a.0.is_less(&b.0)?,
                false => b.0.is_less(&a.0)?,
            };
            merged.extend(if right_first {
                right.next()
            } else {
                left.next()
            });
        }
        merged.extend(left);
        merged.extend(right);
        Ok(merged)
    }
    let sorted = merge(keyed, reverse)?;
    Ok(sorted.into_iter().map(|(_, item)| item).collect())
}

fn sort(runtime: &mut Runtime, value: &Value, args: Args) -> Result<Value> {
    let names = ["reverse", "case_sensitive", "attribute"];
    let [reverse, case_sensitive, attribute] = args.bind("sort", names, 0)?;
    let folds_case = !bool_or(case_sensitive, false);
    // Several attributes are separated by commas.
    let getters: Vec<Getter> = match given(attribute) {
        Some(Value::Str(paths)) => {
            check_names(paths.text.matches(',').count())?;
            let paths = paths.text.split(',').map(Value::from);
            paths
                .map(|path| Getter::with(Some(path), None, folds_case))
                .collect::<Result<_>>()?
        }
        attribute => vec![Getter::with(attribute, None, folds_case)?],
    };
    let mut keyed = Vec::new();
    for item in runtime.collect(value)? {
        let mut keys = Vec::with_capacity(getters.len());
        for getter in &getters {
            keys.push(getter.get(runtime, item.clone())?);
        }
        keyed.push((Value::list(keys)?, item));
    }
    Value::list(sorted(keyed, flag_or(reverse, false)?)?)
}

fn dict_sort(value: Value, args: Args) -> Result<Value> {
    let names = ["case_sensitive", "by", "reverse"];
    let [case_sensitive, by, reverse] = args.bind("dictsort", names, 0)?;
    let by_value = match &*text_or(by, "key")? {
        "key" => false,
        "value" => true,
        _ => {
            let detail = "You can only sort by either \"key\" or \"value\"";
            return Err(Error::runtime(detail));
        }
    };
    value.check_defined()?;
    let Value::Dict(dict) = &value else {
        return Err(Error::type_error("dictsort needs a mapping"));
    };
    let folds_case = !bool_or(case_sensitive, false);
    let mut keyed = Vec::new();
    for (key, value) in &dict.entries {
        let by = if by_value { value } else { key }.clone();
        let by = if folds_case { lowered(by) } else { by };
        keyed.push((by, Value::tuple(vec![key.clone(), value.clone()])?));
    }
    Value::list(sorted(keyed, flag_or(reverse, false)?)?)
}

fn group_by(runtime: &mut Runtime, value: &Value, args: Args) -> Result<Value> {
    let names = ["attribute", "default", "case_sensitive"];
    let [attribute, default, case_sensitive] = args.bind("groupby", names, 1)?;
    let folds_case = !bool_or(case_sensitive, false);
    let getter = Getter::with(attribute.clone(), default.clone(), folds_case)?;
    let mut keyed = Vec::new();
    for item in runtime.collect(value)? {
        keyed.push((getter.get(runtime, item.clone())?, item));
    }
    let sorted = sorted(keyed, false)?;
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for item in sorted {
        let key = getter.get(runtime, item.clone())?;
        match groups.last_mut() {
            Some((last, items)) if last.equals(&key) => items.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let plain = Getter::with(attribute, default, false)?;
    let mut out = Vec::with_capacity(groups.len());
    for (key, items) in groups {
        // jinja2 returns the first element's own key, not the lower-case key that was compared.
        let key = match (folds_case, items.first()) {
            (true, Some(first)) => plain.get(runtime, first.clone())?,
            _ => key,
        };
        out.push(Value::group(key, Value::list(items)?)?);
    }
    Value::list(out)
}

fn unique(value: Value, args: Args) -> Result<Value> {
    let [case_sensitive, attribute] = args.bind("unique", ["case_sensitive", "attribute"], 0)?;
    let getter = Getter::with(attribute, None, !bool_or(case_sensitive, false))?;
    let mut seen = std::collections::HashSet::new();
    let mut elements = None;
    let held = [value.clone()];
    Value::lazy("generator", &held, move |runtime| {
        let elements = begun(&mut elements, &value)?;
        while let Some(item) = elements.next(runtime)? {
            let key = getter.get(runtime, item.clone())?;
            runtime.read_key(&key);
            if seen.insert(Key::new(&key)?) {
                runtime.reserve(1)?;
                return Ok(Some(item));
            }
        }
        Ok(None)
    })
}

fn extreme(runtime: &mut Runtime, value: &Value, args: Args, is_max: bool) -> Result<Value> {
    let name = if is_max { "max" } else { "min" };
    let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
    let getter = Getter::with(attribute, None, !bool_or(case_sensitive, false))?;
    let mut best: Option<(Value, Value)> = None;
    let mut elements = Elements::new(value)?;
    while let Some(item) = elements.next(runtime)? {
        let key = getter.get(runtime, item.clone())?;
        let is_better = match &best {
            None => true,
            Some((best, _)) if is_max => {
                key.compare(best, ">")? == Some(std::cmp::Ordering::Greater)
            }
            Some((best, _)) => key.is_less(best)?,
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(match best {
        Some((_, item)) => item,
        None => Value::undefined("No aggregated item, sequence was empty."),
    })
}

/// Returns a lazy iterator. As in jinja2, it reads nothing from a value that is false, and so raises no error either.
fn lazily(
    value: Value,
    args: &Args,
    mut next: impl FnMut(&mut Runtime, &mut Elements) -> Result<Option<Value>> + 'static,
) -> Result<Value> {
    let named = args.named.iter().map(|(_, value)| value);
    let held: Vec<Value> = std::iter::once(&value)
        .chain(&args.positional)
        .chain(named)
        .cloned()
        .collect();
    let mut elements = None;
    Value::lazy("generator", &held, move |runtime| {
        if !value.is_true() {
            return Ok(None);
        }
        let elements = begun(&mut elements, &value)?;
        next(runtime, elements)
    })
}

fn map(value: Value, args: Args) -> Result<Value> {
    let by_attribute =
        args.positional.is_empty() && args.named.iter().any(|(name, _)| &**name == "attribute");
    if by_attribute {
        let (mut getter, given) = (None, args.clone());
        return lazily(value, &args, move |runtime, elements| {
            let getter = match &mut getter {
                Some(getter) => getter,
                none => {
                    let [attribute, default] =
                        given.clone().bind("map", ["attribute", "default"], 1)?;
                    none.insert(Getter::with(attribute, default, false)?)
                }
            };
            match elements.next(runtime)? {
                Some(item) => getter.get(runtime, item).map(Some),
                None => Ok(None),
            }
        });
    }
    let given = args.clone();
    lazily(value, &args, move |runtime, elements| {
        let Some(name) = given.positional.first() else {
            return Err(Error::runtime("map requires a filter argument"));
        };
        let Some(item) = elements.next(runtime)? else {
            return Ok(None);
        };
        let args = Args {
            positional: given.positional[1..].to_vec(),
            named: given.named.clone(),
        };
        filters::call(runtime, &filter_name(name)?, item, args).map(Some)
    })
}

fn filter_name(name: &Value) -> Result<std::sync::Arc<str>> {
    Key::new(name)?;
    match name {
        Value::Str(name) => Ok(name.text.clone()),
        other => Err(Error::runtime(format!(
            "No filter or test named {}",
            other.named()
        ))),
    }
}

fn select(value: Value, args: Args, by_attribute: bool, wanted: bool) -> Result<Value> {
    let given = args.clone();
    let mut getter = None;
    lazily(value, &args, move |runtime, elements| {
        let test_at = usize::from(by_attribute);
        if by_attribute && getter.is_none() {
            let Some(attribute) = given.positional.first() else {
                let detail = "Missing parameter for attribute name";
                return Err(Error::runtime(detail));
            };
            getter = Some(Getter::with(Some(attribute.clone()), None, false)?);
        }
        while let Some(item) = elements.next(runtime)? {
            let tested = match &getter {
                Some(getter) => getter.get(runtime, item.clone())?,
                None => item.clone(),
            };
            let passes = match given.positional.get(test_at) {
                None => tested.is_true(),
                Some(name) => {
                    let args = Args {
                        positional: given.positional[test_at + 1..].to_vec(),
                        named: given.named.clone(),
                    };
                    predicates::call(runtime, &filter_name(name)?, tested, args)?
                }
            };
            if passes == wanted {
                return Ok(Some(item));
            }
        }
        Ok(None)
    })
}
