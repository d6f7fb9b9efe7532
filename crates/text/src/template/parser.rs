//! Tokens to the tree of [`super::ast`].

use std::collections::HashMap;

use super::ast::{
    Argument, BinaryOp, CompareOp, Expr, For, Link, Literal, Macro, NameId, Program, Stmt, Target,
};
use super::error::TemplateError;
use super::lexer::{Lexer, Token};

/// How deep brackets and blocks may nest, together.
const MAX_NESTING: usize = 64;

/// The most arguments of a call.
pub(super) const MAX_ARGUMENTS: usize = 500;

/// Names that can't be assigned to.
const RESERVED: [&str; 8] = [
    "true", "True", "false", "False", "none", "None", "loop", "self",
];

/// Precedence levels of operators, from `or` to `**`.
const OR: u8 = 0;
const AND: u8 = 1;
const COMPARE: u8 = 2;

/// What ends a block: the names that may, as in `endif`, `else`, `elif`.
type Ends = &'static [&'static str];

pub(super) fn parse(source: &str) -> Result<Program, TemplateError> {
    let mut parser = Parser {
        lexer: Lexer::new(source),
        current: Token::End,
        line: 1,
        nesting: 0,
        in_loop: false,
        program: Program::default(),
        names: HashMap::new(),
    };
    parser.advance()?;
    let body = parser.block(&[])?;
    parser.program.body = body;
    Ok(parser.program)
}

struct Parser<'s> {
    lexer: Lexer<'s>,
    current: Token<'s>,
    /// Of the current token.
    line: u32,
    nesting: usize,
    in_loop: bool,
    program: Program,
    names: HashMap<&'s str, NameId>,
}

type Parsed<T> = Result<T, TemplateError>;

impl<'s> Parser<'s> {
    fn advance(&mut self) -> Parsed<Token<'s>> {
        let next = self.lexer.next()?;
        self.line = self.lexer.line();
        Ok(std::mem::replace(&mut self.current, next))
    }

    fn error<T>(&self, problem: impl Into<String>) -> Parsed<T> {
        Err(TemplateError::Syntax {
            line: self.line as usize,
            problem: problem.into(),
        })
    }

    fn expected<T>(&self, what: &str) -> Parsed<T> {
        self.error(format!(
            "expected {what}, found {}",
            self.current.describe()
        ))
    }

    fn is_op(&self, op: &str) -> bool {
        matches!(self.current, Token::Op(found) if found == op)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.current, Token::Name(found) if found == name)
    }

    fn skip_op(&mut self, op: &str) -> Parsed<bool> {
        let found = self.is_op(op);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn skip_name(&mut self, name: &str) -> Parsed<bool> {
        let found = self.is_name(name);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn expect_op(&mut self, op: &'static str) -> Parsed<()> {
        if self.skip_op(op)? {
            return Ok(());
        }
        self.expected(&format!("`{op}`"))
    }

    fn expect(&mut self, token: Token<'static>) -> Parsed<()> {
        if self.current == token {
            self.advance()?;
            return Ok(());
        }
        self.expected(&token.describe())
    }

    fn name(&mut self) -> Parsed<&'s str> {
        match self.current {
            Token::Name(name) => {
                self.advance()?;
                Ok(name)
            }
            _ => self.expected("a name"),
        }
    }

    fn id(&mut self, name: &'s str) -> NameId {
        if let Some(id) = self.names.get(name) {
            return *id;
        }
        let id = self.program.names.len() as NameId;
        self.program.names.push(name.to_owned());
        self.names.insert(name, id);
        id
    }

    fn literal(&mut self, literal: Literal) -> u32 {
        self.program.literals.push(literal);
        (self.program.literals.len() - 1) as u32
    }

    fn deeper(&mut self) -> Parsed<()> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return self.error(format!(
                "brackets and blocks nest deeper than {MAX_NESTING} levels"
            ));
        }
        Ok(())
    }

    // Statements.

    /// Statements up to a tag that begins with one of `ends`, which is left to be read, or to the template's end if
    /// there are none.
    fn block(&mut self, ends: Ends) -> Parsed<Vec<Stmt>> {
        self.deeper()?;
        let mut statements = Vec::new();
        loop {
            match self.current {
                Token::Text(text) => {
                    self.advance()?;
                    statements.push(Stmt::Text(text.to_owned()));
                }
                Token::EmitStart => {
                    let line = self.line;
                    self.advance()?;
                    let value = self.tuple_or_expr()?;
                    self.expect(Token::EmitEnd)?;
                    statements.push(Stmt::Emit(line, value));
                }
                Token::TagStart => {
                    self.advance()?;
                    if let Token::Name(name) = self.current
                        && ends.contains(&name)
                    {
                        break;
                    }
                    let statement = self.statement()?;
                    statements.push(statement);
                    self.expect(Token::TagEnd)?;
                }
                Token::End if ends.is_empty() => break,
                _ => return self.expected(&format!("`{}`", ends.last().unwrap_or(&"text"))),
            }
        }
        self.nesting -= 1;
        Ok(statements)
    }

    /// The end of a tag, then a block and the name that ends it, whose tag's end is left to be read.
    fn body_until(&mut self, ends: Ends) -> Parsed<(Vec<Stmt>, &'s str)> {
        self.expect(Token::TagEnd)?;
        let body = self.block(ends)?;
        Ok((body, self.name()?))
    }

    fn body(&mut self, end: Ends) -> Parsed<Vec<Stmt>> {
        Ok(self.body_until(end)?.0)
    }

    /// A tag behind its `{%`, with the block that belongs to it, up to the last `%}`, which is left to be read.
    fn statement(&mut self) -> Parsed<Stmt> {
        let line = self.line;
        let Token::Name(name) = self.current else {
            return self.expected("the name of a statement");
        };
        self.advance()?;
        Ok(match name {
            "for" => self.for_loop(line)?,
            "if" => self.if_branches()?,
            "set" => self.set(line)?,
            "with" => {
                let mut values = Vec::new();
                while self.current != Token::TagEnd {
                    if !values.is_empty() {
                        self.expect_op(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect_op("=")?;
                    values.push((target, self.expr()?));
                }
                Stmt::With(line, values, self.body(&["endwith"])?)
            }
            "filter" => {
                let filters = self.filter_chain()?;
                Stmt::Filter(line, filters, self.body(&["endfilter"])?)
            }
            "macro" => {
                let name = self.name()?;
                let name = self.id(name);
                self.expect_op("(")?;
                let parameters = self.parameters()?;
                Stmt::Macro(self.macro_body(name, parameters, &["endmacro"])?)
            }
            "call" => {
                let parameters = match self.skip_op("(")? {
                    true => self.parameters()?,
                    false => Vec::new(),
                };
                let call = self.expr()?;
                match &call {
                    Expr::Chain(_, links)
                        if matches!(links.last(), Some(Link::Call(_) | Link::Method(..))) => {}
                    _ => return self.error("expected a call of a macro behind `call`"),
                }
                let caller = self.id("caller");
                Stmt::Call(
                    line,
                    self.macro_body(caller, parameters, &["endcall"])?,
                    call,
                )
            }
            // Marks answers for training.
            "generation" => Stmt::Block(self.body(&["endgeneration"])?),
            "block" => {
                self.name()?;
                let in_loop = std::mem::replace(&mut self.in_loop, false);
                while self.current != Token::TagEnd {
                    self.name()?;
                }
                let body = self.body(&["endblock"])?;
                if let Token::Name(_) = self.current {
                    self.advance()?;
                }
                self.in_loop = in_loop;
                Stmt::Block(body)
            }
            "autoescape" => {
                if !self.skip_name("false")? && !self.skip_name("False")? {
                    return self.error("expected `autoescape false`: prompts are no HTML");
                }
                Stmt::Block(self.body(&["endautoescape"])?)
            }
            "do" => Stmt::Do(line, self.expr()?),
            "break" | "continue" if !self.in_loop => {
                return self.error(format!("`{name}` stands outside of a loop"));
            }
            "break" => Stmt::Break,
            "continue" => Stmt::Continue,
            "include" | "import" | "from" | "extends" => {
                return self.error(format!(
                    "`{name}` asks for another template, and there is none"
                ));
            }
            _ => {
                let name = Token::Name(name).describe();
                return self.error(format!("unknown statement {name}"));
            }
        })
    }

    fn for_loop(&mut self, line: u32) -> Parsed<Stmt> {
        let target = self.target(false)?;
        if !self.skip_name("in")? {
            return self.expected("`in`");
        }
        let items = self.operators(OR)?;
        let condition = match self.skip_name("if")? {
            true => Some(self.expr()?),
            false => None,
        };
        let recursive = self.skip_name("recursive")?;
        let in_loop = std::mem::replace(&mut self.in_loop, true);
        let (body, end) = self.body_until(&["else", "endfor"])?;
        self.in_loop = in_loop;
        let otherwise = match end {
            "else" => self.body(&["endfor"])?,
            _ => Vec::new(),
        };
        self.program.loops.push(For {
            target,
            items,
            condition,
            recursive,
            body,
            otherwise,
        });
        Ok(Stmt::For(line, self.program.loops.len() - 1))
    }

    fn if_branches(&mut self) -> Parsed<Stmt> {
        let mut branches = Vec::new();
        loop {
            let line = self.line;
            let test = self.operators(OR)?;
            let (body, end) = self.body_until(&["elif", "else", "endif"])?;
            branches.push((line, test, body));
            let otherwise = match end {
                "elif" => continue,
                "else" => self.body(&["endif"])?,
                _ => Vec::new(),
            };
            return Ok(Stmt::If(branches, otherwise));
        }
    }

    fn set(&mut self, line: u32) -> Parsed<Stmt> {
        let target = self.target(true)?;
        if self.skip_op("=")? {
            return Ok(Stmt::Set(line, target, self.tuple_or_expr()?));
        }
        let filters = match self.skip_op("|")? {
            true => self.filter_chain()?,
            false => Vec::new(),
        };
        Ok(Stmt::SetBlock(
            line,
            target,
            filters,
            self.body(&["endset"])?,
        ))
    }

    /// What a value is assigned to; `dotted` if that may be an attribute.
    fn target(&mut self, dotted: bool) -> Parsed<Target> {
        self.deeper()?;
        let mut targets = Vec::new();
        let mut several = false;
        loop {
            let target = if self.skip_op("(")? {
                let inner = self.target(dotted)?;
                self.expect_op(")")?;
                inner
            } else {
                let name = self.name()?;
                if RESERVED.contains(&name) {
                    return self.error(format!("`{name}` can't be assigned to"));
                }
                let id = self.id(name);
                let mut attributes = Vec::new();
                while dotted && self.skip_op(".")? {
                    let attribute = self.name()?;
                    attributes.push(self.id(attribute));
                }
                match attributes.is_empty() {
                    true => Target::Name(id),
                    false => Target::Attribute(id, attributes),
                }
            };
            targets.push(target);
            if !self.skip_op(",")? {
                break;
            }
            several = true;
            if self.is_name("in") || self.is_op("=") || self.is_op(")") {
                break;
            }
        }
        self.nesting -= 1;
        Ok(match targets.pop() {
            Some(only) if !several => only,
            last => {
                targets.extend(last);
                Target::Several(targets)
            }
        })
    }

    /// The parameters of a macro behind `(`, up to `)`.
    fn parameters(&mut self) -> Parsed<Vec<(NameId, Option<Expr>)>> {
        let mut parameters: Vec<(NameId, Option<Expr>)> = Vec::new();
        while !self.skip_op(")")? {
            if !parameters.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(")")? {
                    break;
                }
            }
            let name = self.name()?;
            if RESERVED.contains(&name) {
                return self.error(format!("`{name}` can't be a parameter"));
            }
            let name = self.id(name);
            let default = match self.skip_op("=")? {
                true => Some(self.expr()?),
                false if parameters.iter().any(|(_, default)| default.is_some()) => {
                    return self.expected("`=`: parameters before have defaults");
                }
                false => None,
            };
            parameters.push((name, default));
            if parameters.len() > MAX_ARGUMENTS {
                return self.error(format!("more than {MAX_ARGUMENTS} parameters"));
            }
        }
        Ok(parameters)
    }

    fn macro_body(
        &mut self,
        name: NameId,
        parameters: Vec<(NameId, Option<Expr>)>,
        end: Ends,
    ) -> Parsed<usize> {
        let in_loop = std::mem::replace(&mut self.in_loop, false);
        let body = self.body(end)?;
        self.in_loop = in_loop;
        // `endmacro` may repeat the name.
        if let Token::Name(_) = self.current {
            self.advance()?;
        }
        self.program.macros.push(Macro {
            name,
            is_caller: end == ["endcall"],
            parameters,
            body,
        });
        Ok(self.program.macros.len() - 1)
    }

    /// Filters without a value before them: `upper | trim`.
    fn filter_chain(&mut self) -> Parsed<Vec<Link>> {
        let mut links = vec![self.filter()?];
        while self.skip_op("|")? {
            links.push(self.filter()?);
        }
        Ok(links)
    }

    // Expressions.

    fn tuple_or_expr(&mut self) -> Parsed<Expr> {
        let first = self.expr()?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_op(",")? {
            if matches!(self.current, Token::TagEnd | Token::EmitEnd) {
                break;
            }
            items.push(self.expr()?);
        }
        Ok(Expr::Tuple(items))
    }

    /// `value if test else …`
    fn expr(&mut self) -> Parsed<Expr> {
        self.deeper()?;
        let mut branches = Vec::new();
        let last = loop {
            let value = self.operators(OR)?;
            if !self.skip_name("if")? {
                break Some(value);
            }
            let test = self.operators(OR)?;
            branches.push((value, test));
            if !self.skip_name("else")? {
                break None;
            }
        };
        self.nesting -= 1;
        Ok(match last {
            Some(only) if branches.is_empty() => only,
            last => Expr::If(branches, last.map(Box::new)),
        })
    }

    /// The binary operator here, and its precedence.
    fn operator(&self) -> Option<(Operator, u8)> {
        use Operator::{And, Binary, Compare, Or};
        Some(match &self.current {
            Token::Name("or") => (Or, OR),
            Token::Name("and") => (And, AND),
            Token::Name("in") => (Compare(CompareOp::In), COMPARE),
            Token::Name("not") => (Compare(CompareOp::NotIn), COMPARE),
            Token::Op(op) => match *op {
                "==" => (Compare(CompareOp::Equal), COMPARE),
                "!=" => (Compare(CompareOp::NotEqual), COMPARE),
                "<" => (Compare(CompareOp::Less), COMPARE),
                "<=" => (Compare(CompareOp::LessOrEqual), COMPARE),
                ">" => (Compare(CompareOp::Greater), COMPARE),
                ">=" => (Compare(CompareOp::GreaterOrEqual), COMPARE),
                "+" => (Binary(BinaryOp::Add), 3),
                "-" => (Binary(BinaryOp::Subtract), 3),
                "~" => (Binary(BinaryOp::Concat), 4),
                "*" => (Binary(BinaryOp::Multiply), 5),
                "/" => (Binary(BinaryOp::Divide), 5),
                "//" => (Binary(BinaryOp::FloorDivide), 5),
                "%" => (Binary(BinaryOp::Remainder), 5),
                "**" => (Binary(BinaryOp::Power), 6),
                _ => return None,
            },
            _ => return None,
        })
    }

    /// Operands and the operators of `level` and above between them.
    fn operators(&mut self, level: u8) -> Parsed<Expr> {
        let mut left = self.operand(level)?;
        while let Some((_, found)) = self.operator().filter(|(_, found)| *found >= level) {
            left = self.operators_of(found, left)?;
        }
        Ok(left)
    }

    /// The operators of one level behind `first`.
    #[inline(never)]
    fn operators_of(&mut self, level: u8, first: Expr) -> Parsed<Expr> {
        let mut operands = vec![];
        let mut compared = vec![];
        let mut combined = vec![];
        while let Some((operator, _)) = self.operator().filter(|(_, found)| *found == level) {
            self.advance()?;
            if matches!(operator, Operator::Compare(CompareOp::NotIn)) && !self.skip_name("in")? {
                return self.expected("`in`");
            }
            let right = self.operators(level + 1)?;
            match operator {
                Operator::Or | Operator::And => operands.push(right),
                Operator::Compare(op) => compared.push((op, right)),
                Operator::Binary(op) => combined.push((op, right)),
            }
        }
        Ok(match level {
            OR | AND => {
                operands.insert(0, first);
                match level {
                    OR => Expr::Or(operands),
                    _ => Expr::And(operands),
                }
            }
            COMPARE => Expr::Compare(Box::new(first), compared),
            _ => Expr::Binary(Box::new(first), combined),
        })
    }

    /// `not`, signs, a value, and what is done to it.
    fn operand(&mut self, level: u8) -> Parsed<Expr> {
        if level <= COMPARE && self.is_name("not") {
            let mut odd = false;
            while self.skip_name("not")? {
                odd = !odd;
            }
            return Ok(Expr::Not(Box::new(self.operators(COMPARE)?), odd));
        }
        let value = self.signed()?;
        let mut links = Vec::new();
        loop {
            if self.skip_op("|")? {
                links.push(self.filter()?);
            } else if self.skip_name("is")? {
                links.push(self.test()?);
            } else {
                break;
            }
        }
        Ok(chain(value, links))
    }

    fn signed(&mut self) -> Parsed<Expr> {
        let mut signs = 0;
        let mut odd = false;
        while self.is_op("-") || self.is_op("+") {
            odd ^= self.is_op("-");
            signs += 1;
            self.advance()?;
        }
        let value = self.primary()?;
        let links = self.postfix()?;
        let value = chain(value, links);
        Ok(match signs {
            0 => value,
            _ => Expr::Negate(Box::new(value), odd),
        })
    }

    fn primary(&mut self) -> Parsed<Expr> {
        match &self.current {
            Token::Name(name) => {
                let name = *name;
                self.advance()?;
                let literal = match name {
                    "true" | "True" => Literal::Bool(true),
                    "false" | "False" => Literal::Bool(false),
                    "none" | "None" => Literal::None,
                    _ => return Ok(Expr::Name(self.id(name))),
                };
                Ok(Expr::Literal(self.literal(literal)))
            }
            Token::Str(_) => {
                let mut text = String::new();
                while let Token::Str(part) = &self.current {
                    text.push_str(part);
                    self.advance()?;
                }
                Ok(Expr::Literal(self.literal(Literal::Str(text))))
            }
            Token::Int(number) => {
                let literal = Literal::Int(*number);
                self.advance()?;
                Ok(Expr::Literal(self.literal(literal)))
            }
            Token::Float(number) => {
                let literal = Literal::Float(*number);
                self.advance()?;
                Ok(Expr::Literal(self.literal(literal)))
            }
            Token::Op("(") => self.parenthesis(),
            Token::Op("[") => {
                self.advance()?;
                Ok(Expr::List(self.items("]")?))
            }
            Token::Op("{") => self.map(),
            _ => self.expected("an expression"),
        }
    }

    #[inline(never)]
    fn parenthesis(&mut self) -> Parsed<Expr> {
        self.advance()?;
        if self.skip_op(")")? {
            return Ok(Expr::Tuple(Vec::new()));
        }
        let first = self.expr()?;
        if self.skip_op(")")? {
            return Ok(first);
        }
        self.expect_op(",")?;
        let mut items = vec![first];
        items.append(&mut self.items(")")?);
        Ok(Expr::Tuple(items))
    }

    #[inline(never)]
    fn items(&mut self, end: &'static str) -> Parsed<Vec<Expr>> {
        let mut items = Vec::new();
        while !self.skip_op(end)? {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(end)? {
                    break;
                }
            }
            items.push(self.expr()?);
        }
        Ok(items)
    }

    #[inline(never)]
    fn map(&mut self) -> Parsed<Expr> {
        self.advance()?;
        let mut entries = Vec::new();
        while !self.skip_op("}")? {
            if !entries.is_empty() {
                self.expect_op(",")?;
                if self.skip_op("}")? {
                    break;
                }
            }
            let key = self.expr()?;
            self.expect_op(":")?;
            entries.push((key, self.expr()?));
        }
        Ok(Expr::Map(entries))
    }

    /// Attributes, subscripts and calls.
    fn postfix(&mut self) -> Parsed<Vec<Link>> {
        let mut links = Vec::new();
        loop {
            if self.skip_op(".")? {
                if let Token::Int(index) = self.current {
                    self.advance()?;
                    let index = self.literal(Literal::Int(index));
                    links.push(Link::Item(Expr::Literal(index)));
                    continue;
                }
                let name = self.name()?;
                let name = self.id(name);
                links.push(match self.is_op("(") {
                    true => Link::Method(name, self.arguments()?),
                    false => Link::Attribute(name),
                });
            } else if self.is_op("[") {
                links.push(self.subscript()?);
            } else if self.is_op("(") {
                links.push(Link::Call(self.arguments()?));
            } else {
                return Ok(links);
            }
        }
    }

    #[inline(never)]
    fn subscript(&mut self) -> Parsed<Link> {
        self.advance()?;
        let mut parts = [None, None, None];
        let mut n = 0;
        loop {
            if self.skip_op("]")? {
                break;
            }
            if self.skip_op(":")? {
                n += 1;
                if n > 2 {
                    return self.expected("`]`");
                }
                continue;
            }
            if parts[n].is_some() {
                return self.expected("`]`");
            }
            parts[n] = Some(self.expr()?);
        }
        match parts {
            [Some(index), None, None] if n == 0 => Ok(Link::Item(index)),
            [None, None, None] if n == 0 => self.error("a subscript is empty"),
            parts => Ok(Link::Slice(Box::new(parts))),
        }
    }

    #[inline(never)]
    fn arguments(&mut self) -> Parsed<Vec<Argument>> {
        self.expect_op("(")?;
        let mut arguments = Vec::new();
        let mut named = false;
        while !self.skip_op(")")? {
            if !arguments.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(")")? {
                    break;
                }
            }
            if arguments.len() == MAX_ARGUMENTS {
                return self.error(format!("more than {MAX_ARGUMENTS} arguments"));
            }
            if self.skip_op("**")? {
                named = true;
                arguments.push(Argument::NamedSplat(self.expr()?));
                continue;
            }
            if self.skip_op("*")? {
                arguments.push(Argument::Splat(self.expr()?));
                continue;
            }
            let value = self.expr()?;
            match value {
                Expr::Name(id) if self.skip_op("=")? => {
                    named = true;
                    let name = self.program.names[id as usize].clone();
                    let name = self.literal(Literal::Str(name));
                    arguments.push(Argument::Named(name, self.expr()?));
                }
                _ if named => return self.error("an argument without a name follows one with"),
                value => arguments.push(Argument::Positional(value)),
            }
        }
        Ok(arguments)
    }

    /// The name of a filter or test and its arguments, if it has any in brackets.
    fn filter(&mut self) -> Parsed<Link> {
        let name = self.name()?;
        let id = self.id(name);
        let arguments = match self.is_op("(") {
            true => self.arguments()?,
            false => Vec::new(),
        };
        Ok(Link::Filter(id, arguments))
    }

    #[inline(never)]
    fn test(&mut self) -> Parsed<Link> {
        let negated = self.skip_name("not")?;
        let name = self.name()?;
        let id = self.id(name);
        let takes_value = match &self.current {
            Token::Name(name) => {
                !["and", "or", "else", "is", "if", "in", "not", "recursive"].contains(name)
            }
            Token::Str(_) | Token::Int(_) | Token::Float(_) => true,
            Token::Op(op) => ["[", "{"].contains(op),
            _ => false,
        };
        let arguments = if self.is_op("(") {
            self.arguments()?
        } else if takes_value {
            self.deeper()?;
            let value = self.primary()?;
            let links = self.postfix()?;
            self.nesting -= 1;
            vec![Argument::Positional(chain(value, links))]
        } else {
            Vec::new()
        };
        Ok(Link::Test(id, arguments, negated))
    }
}

#[derive(Debug, Clone, Copy)]
enum Operator {
    Or,
    And,
    Compare(CompareOp),
    Binary(BinaryOp),
}

fn chain(value: Expr, links: Vec<Link>) -> Expr {
    match links.is_empty() {
        true => value,
        false => Expr::Chain(Box::new(value), links),
    }
}
