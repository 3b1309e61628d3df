use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::large_stack::on_large_stack;
use crate::parser::{self, Parsed};
use crate::{Result, runtime};

/// A template that has been parsed.
///
/// Clones share the parsed template, and threads may render it at the same time.
#[derive(Clone)]
pub struct Template {
    source: Arc<str>,
    parsed: Arc<Parsed>,
}

impl Template {
    /// Parses a template.
    ///
    /// Line ends `\r\n` and `\r` count as `\n`, and one line end at the end of the source is dropped, as in jinja2.
    ///
    /// # Errors
    /// An [`Error`](crate::Error) with the line, if the source is not valid or beyond a [limit](crate#limits).
    ///
    /// ```
    /// use overdrive_jinja::Template;
    ///
    /// let error = Template::parse("a\n{% if x %}").unwrap_err();
    /// assert_eq!(error.line(), Some(2));
    /// ```
    pub fn parse(source: &str) -> Result<Template> {
        let parsed = on_large_stack(|| parser::parse(source))?;
        Ok(Template {
            source: source.into(),
            parsed: Arc::new(parsed),
        })
    }

    /// Returns the source that was parsed.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns `true` if the template has a `{% generation %}` tag, which encloses the assistant's text.
    pub fn has_generation(&self) -> bool {
        self.parsed.has_generation
    }

    /// Renders the template with variables.
    ///
    /// # Errors
    /// An [`Error`](crate::Error) with the line, if Python would raise an exception or a [limit](crate#limits) is reached.
    ///
    /// ```
    /// use overdrive_jinja::Template;
    ///
    /// let template = Template::parse("{{ raise_exception('no ' ~ role) if role != 'user' else role }}")?;
    /// let role = |role: &str| [("role".to_owned(), role.into())].into_iter().collect();
    /// assert_eq!(template.render(&role("user"))?, "user");
    /// let error = template.render(&role("tool")).unwrap_err();
    /// assert!(error.is_raised());
    /// assert_eq!(error.to_string(), "no tool");
    /// # Ok::<(), overdrive_jinja::Error>(())
    /// ```
    pub fn render(&self, variables: &Map<String, Value>) -> Result<String> {
        on_large_stack(|| runtime::render(&self.parsed.body, variables, None))
    }

    /// Renders the template with variables, and writes `begin` before and `end` after the text of each `generation` tag.
    ///
    /// The two characters should be ones that no variable contains, such as Unicode's noncharacters.
    ///
    /// # Errors
    /// As [`Template::render`].
    ///
    /// ```
    /// use overdrive_jinja::Template;
    ///
    /// let template = Template::parse("U: Hi A: {% generation %}Hello{% endgeneration %}")?;
    /// assert_eq!(template.render_marked(&Default::default(), ('[', ']'))?, "U: Hi A: [Hello]");
    /// # Ok::<(), overdrive_jinja::Error>(())
    /// ```
    pub fn render_marked(
        &self,
        variables: &Map<String, Value>,
        (begin, end): (char, char),
    ) -> Result<String> {
        on_large_stack(|| runtime::render(&self.parsed.body, variables, Some((begin, end))))
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}
