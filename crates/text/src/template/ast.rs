//! A template as its parser understands it.
//!
//! Chains of operators, subscripts, filters and branches are flat lists, so that only brackets and blocks nest;
//! their depth is limited by the parser.

/// A name, by its place in [`Program::names`].
pub(super) type NameId = u32;

/// A compiled template.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub(super) names: Vec<String>,
    pub(super) literals: Vec<Literal>,
    pub(super) loops: Vec<For>,
    pub(super) macros: Vec<Macro>,
    pub(super) body: Vec<Stmt>,
}

#[derive(Debug)]
pub(super) enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
}

#[derive(Debug)]
pub(super) enum Stmt {
    Text(String),
    Emit(u32, Expr),
    Do(u32, Expr),
    /// By its place in [`Program::loops`].
    For(u32, usize),
    If(Vec<(u32, Expr, Vec<Stmt>)>, Vec<Stmt>),
    Set(u32, Target, Expr),
    SetBlock(u32, Target, Vec<Link>, Vec<Stmt>),
    With(u32, Vec<(Target, Expr)>, Vec<Stmt>),
    Filter(u32, Vec<Link>, Vec<Stmt>),
    /// By its place in [`Program::macros`].
    Macro(usize),
    /// A call whose `caller` is a macro, by its place.
    Call(u32, usize, Expr),
    Block(Vec<Stmt>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) items: Expr,
    pub(super) condition: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Vec<Stmt>,
    pub(super) otherwise: Vec<Stmt>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: NameId,
    /// The body of a `call`, which has no name of its own.
    pub(super) is_caller: bool,
    pub(super) parameters: Vec<(NameId, Option<Expr>)>,
    pub(super) body: Vec<Stmt>,
}

#[derive(Debug)]
pub(super) enum Target {
    Name(NameId),
    /// `name.attribute`, for namespaces.
    Attribute(NameId, Vec<NameId>),
    Several(Vec<Target>),
}

#[derive(Debug)]
pub(super) enum Expr {
    /// By its place in [`Program::literals`].
    Literal(u32),
    Name(NameId),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    /// What is done to a value, one after the other.
    Chain(Box<Expr>, Vec<Link>),
    Not(Box<Expr>, bool),
    Negate(Box<Expr>, bool),
    /// Operators of one precedence, from left to right.
    Binary(Box<Expr>, Vec<(BinaryOp, Expr)>),
    Compare(Box<Expr>, Vec<(CompareOp, Expr)>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    /// `value if test else …`
    If(Vec<(Expr, Expr)>, Option<Box<Expr>>),
}

#[derive(Debug)]
pub(super) enum Link {
    Attribute(NameId),
    Item(Expr),
    Slice(Box<[Option<Expr>; 3]>),
    Call(Vec<Argument>),
    Method(NameId, Vec<Argument>),
    Filter(NameId, Vec<Argument>),
    /// The flag is for `is not`.
    Test(NameId, Vec<Argument>, bool),
}

#[derive(Debug)]
pub(super) enum Argument {
    Positional(Expr),
    /// The name is a literal.
    Named(u32, Expr),
    Splat(Expr),
    NamedSplat(Expr),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BinaryOp {
    Add,
    Subtract,
    Concat,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CompareOp {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}
