//! The syntax tree of a template.
//!
//! Chains of operators and of suffixes are lists rather than nested nodes, so that the nesting that the parser allows
//! bounds the height of a tree.

use std::sync::Arc;

pub(crate) type Name = Arc<str>;

/// A statement with its line.
#[derive(Debug)]
pub(crate) struct Statement {
    pub(crate) line: u32,
    pub(crate) kind: StatementKind,
}

#[derive(Debug)]
pub(crate) enum StatementKind {
    Data(String),
    Print(Expr),
    For(Arc<For>),
    If {
        branches: Vec<(Expr, Vec<Statement>)>,
        otherwise: Vec<Statement>,
    },
    Set(Target, Expr),
    SetBlock {
        target: Target,
        filters: Vec<(u32, Suffix)>,
        body: Vec<Statement>,
    },
    With(Vec<(Target, Expr)>, Vec<Statement>),
    Macro(Arc<Macro>),
    Call(Arc<Macro>, Expr),
    Filter(Vec<(u32, Suffix)>, Vec<Statement>),
    Block {
        body: Vec<Statement>,
        scoped: bool,
    },
    /// The `{% generation %}` tag of transformers, around the assistant's text.
    Generation(Vec<Statement>),
    Break,
    Continue,
    /// `include`, `import`, `from` or `extends`: there are no other templates.
    OtherTemplate,
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) iterable: Expr,
    pub(crate) test: Option<Expr>,
    pub(crate) recursive: bool,
    pub(crate) body: Vec<Statement>,
    pub(crate) otherwise: Vec<Statement>,
}

/// A macro, or the body of a `call` tag.
#[derive(Debug)]
pub(crate) struct Macro {
    pub(crate) name: Option<Name>,
    pub(crate) parameters: Vec<Name>,
    /// The default values of the last parameters.
    pub(crate) defaults: Vec<Expr>,
    pub(crate) body: Vec<Statement>,
    pub(crate) uses: SpecialNames,
}

/// The special names that the body of a macro reads; each is passed only if it is read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SpecialNames {
    pub(crate) caller: bool,
    pub(crate) kwargs: bool,
    pub(crate) varargs: bool,
}

/// The left side of an assignment.
#[derive(Debug)]
pub(crate) enum Target {
    Name(Name),
    /// An attribute of a namespace.
    Attribute(Name, Name),
    Tuple(Vec<Target>),
}

/// An expression with its line.
#[derive(Debug)]
pub(crate) struct Expr {
    pub(crate) line: u32,
    pub(crate) kind: ExprKind,
}

#[derive(Debug)]
pub(crate) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Not(Box<Expr>),
    /// Operators of one precedence, from left to right.
    Math(Box<Expr>, Vec<(MathOperator, Expr)>),
    Concat(Vec<Expr>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    /// A chain as in Python: `a < b < c`.
    Compare(Box<Expr>, Vec<(CompareOperator, Expr)>),
    Condition {
        test: Box<Expr>,
        then: Box<Expr>,
        otherwise: Option<Box<Expr>>,
    },
    Suffixes(Box<Expr>, Vec<(u32, Suffix)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MathOperator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompareOperator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

/// An operation that is written after a value: an attribute, an item, a call, a filter or a test.
#[derive(Debug)]
pub(crate) enum Suffix {
    Attribute(Name),
    Item(Expr),
    Slice([Option<Expr>; 3]),
    Call(Arguments),
    Filter(Name, Arguments),
    Test {
        name: Name,
        arguments: Arguments,
        negated: bool,
    },
}

/// The arguments of a call, a filter or a test.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) positional: Vec<Expr>,
    pub(crate) named: Vec<(Name, Expr)>,
    /// `*value`
    pub(crate) more_positional: Option<Expr>,
    /// `**value`
    pub(crate) more_named: Option<Expr>,
}
