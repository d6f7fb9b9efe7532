//! Carries out a template.
//!
//! Recursion is counted ([`MAX_DEPTH`]), every step is paid for, and values are made only by [`super::value`], which
//! asks for their bytes first.

use std::cmp::Ordering;
use std::rc::Rc;

use super::args::Args;
use super::ast::{
    Argument, BinaryOp, CompareOp, Expr, Link, Literal, NameId, Program, Stmt, Target,
};
use super::clock::DateTime;
use super::error::Fault;
use super::meter::{Hold, Meter};
use super::parser::MAX_ARGUMENTS;
use super::value::{self, List, LoopValue, MacroValue, Map, Text, Value};
use super::{operators, predicates};
use std::cell::Cell;

/// How deep expressions, blocks and calls may lie in each other while they are carried out.
const MAX_DEPTH: u32 = 240;

/// Functions that every template has.
pub(super) const FUNCTIONS: [&str; 7] = [
    "range",
    "dict",
    "namespace",
    "joiner",
    "cycler",
    "raise_exception",
    "strftime_now",
];

/// What a statement does to the loop around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// The variables of a block.
#[derive(Debug, Default)]
struct Frame {
    variables: Vec<(NameId, Value)>,
    /// The body of a macro, which sees none of its caller's variables.
    is_macro: bool,
}

pub(super) struct Renderer<'p> {
    pub(super) program: &'p Program,
    pub(super) meter: Rc<Meter>,
    pub(super) now: Option<DateTime>,
    /// Variables of the template itself, by name.
    globals: Vec<Value>,
    frames: Vec<Frame>,
    /// Their attributes. Namespaces live as long as the rendering.
    pub(super) namespaces: Vec<Vec<(Value, Value)>>,
    /// What each `loop.changed` was asked last.
    changed: Vec<Value>,
    literals: Vec<Option<Value>>,
    outputs: Vec<Text>,
    depth: u32,
    line: u32,
    /// The names `loop` and `caller`, where the template has them.
    loop_name: Option<NameId>,
    caller_name: Option<NameId>,
    /// The most bytes that a prompt may have.
    max_output: usize,
}

impl<'p> Renderer<'p> {
    pub(super) fn new(
        program: &'p Program,
        meter: Rc<Meter>,
        now: Option<DateTime>,
        max_output: usize,
    ) -> Result<Self, Fault> {
        let globals = program.names.iter().map(|name| {
            let function = FUNCTIONS.into_iter().find(|function| function == name);
            function.map_or(Value::Undefined, Value::Function)
        });
        let name = |name: &str| program.names.iter().position(|known| known == name);
        let mut renderer = Self {
            loop_name: name("loop").map(|at| at as NameId),
            caller_name: name("caller").map(|at| at as NameId),
            program,
            now,
            globals: globals.collect(),
            frames: Vec::new(),
            namespaces: Vec::new(),
            changed: Vec::new(),
            literals: vec![None; program.literals.len()],
            outputs: Vec::new(),
            depth: 0,
            line: 0,
            max_output,
            meter,
        };
        renderer.begin_output()?;
        Ok(renderer)
    }

    /// Sets a variable, made by `value` if the template names it.
    pub(super) fn define(
        &mut self,
        name: &str,
        value: impl FnOnce(&Rc<Meter>) -> Result<Value, Fault>,
    ) -> Result<(), Fault> {
        if let Some(at) = self.program.names.iter().position(|known| known == name) {
            self.globals[at] = value(&self.meter)?;
        }
        Ok(())
    }

    /// The line that is being carried out.
    pub(super) fn line(&self) -> u32 {
        self.line
    }

    pub(super) fn run(&mut self) -> Result<String, Fault> {
        self.block(&self.program.body)?;
        Ok(self
            .outputs
            .pop()
            .map(Text::into_string)
            .unwrap_or_default())
    }

    pub(super) fn enter(&mut self) -> Result<(), Fault> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Fault::new(format!(
                "expressions, blocks and macros nest deeper than {MAX_DEPTH} levels"
            )));
        }
        Ok(())
    }

    pub(super) fn leave(&mut self) {
        self.depth -= 1;
    }

    // Output.

    fn begin_output(&mut self) -> Result<(), Fault> {
        let output = Text::new(&self.meter)?;
        self.outputs.push(output);
        Ok(())
    }

    fn end_output(&mut self) -> Value {
        match self.outputs.pop() {
            Some(text) => text.into_value(),
            None => Value::Undefined,
        }
    }

    fn write(&mut self, value: &Value) -> Result<(), Fault> {
        // The output is taken out, because printing reads the renderer.
        let Some(mut out) = self.outputs.pop() else {
            return Ok(());
        };
        let written = self.print(value, &mut out);
        let len = out.len();
        self.outputs.push(out);
        self.written(len)?;
        written
    }

    fn write_str(&mut self, text: &str) -> Result<(), Fault> {
        let Some(out) = self.outputs.last_mut() else {
            return Ok(());
        };
        out.push_str(text)?;
        let len = out.len();
        self.written(len)
    }

    fn written(&self, len: usize) -> Result<(), Fault> {
        if len > self.max_output {
            let limit = self.max_output;
            return Err(Fault::new(format!("the prompt grows beyond {limit} bytes")));
        }
        Ok(())
    }

    // Variables.

    fn lookup(&self, id: NameId) -> Result<Value, Fault> {
        for frame in self.frames.iter().rev() {
            self.meter.work(frame.variables.len() / 16)?;
            let mut variables = frame.variables.iter().rev();
            if let Some((_, value)) = variables.find(|(name, _)| *name == id) {
                return Ok(value.clone());
            }
            if frame.is_macro {
                break;
            }
        }
        Ok(self.globals[id as usize].clone())
    }

    fn store(&mut self, id: NameId, value: Value) -> Result<(), Fault> {
        let Some(frame) = self.frames.last_mut() else {
            self.globals[id as usize] = value;
            return Ok(());
        };
        self.meter.work(frame.variables.len() / 16)?;
        match frame.variables.iter_mut().find(|(name, _)| *name == id) {
            Some((_, old)) => *old = value,
            None => frame.variables.push((id, value)),
        }
        Ok(())
    }

    /// Carries out `inner` with variables of its own.
    fn scoped<T>(
        &mut self,
        is_macro: bool,
        inner: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.frames.push(Frame {
            variables: Vec::new(),
            is_macro,
        });
        let result = inner(self);
        self.frames.pop();
        result
    }

    #[inline(never)]
    fn assign(&mut self, target: &Target, value: Value) -> Result<(), Fault> {
        match target {
            Target::Name(id) => self.store(*id, value),
            Target::Attribute(id, path) => self.assign_attribute(*id, path, value),
            Target::Several(targets) => {
                let items = self.items(&value)?;
                if items.items().len() != targets.len() {
                    let (found, expected) = (items.items().len(), targets.len());
                    return Err(Fault::new(format!(
                        "expected {expected} values to assign, found {found}"
                    )));
                }
                for (target, item) in targets.iter().zip(items.items()) {
                    self.assign(target, item.clone())?;
                }
                Ok(())
            }
        }
    }

    fn assign_attribute(&mut self, id: NameId, path: &[NameId], value: Value) -> Result<(), Fault> {
        let program = self.program;
        let mut object = self.lookup(id)?;
        let Some((last, before)) = path.split_last() else {
            return Ok(());
        };
        for name in before {
            object = self.attribute(&object, &program.names[*name as usize])?;
        }
        let Value::Namespace(at) = object else {
            return Err(Fault::new(format!(
                "expected a namespace to set an attribute of, found {}",
                object.kind()
            )));
        };
        self.set_attribute(at, &program.names[*last as usize], value)
    }

    fn set_attribute(&mut self, at: usize, name: &str, value: Value) -> Result<(), Fault> {
        let attributes = &mut self.namespaces[at];
        self.meter.work(attributes.len() / 2)?;
        let mut known = attributes.iter_mut();
        match known.find(|(known, _)| known.as_str() == Some(name)) {
            Some((_, old)) => *old = value,
            None => {
                // Namespaces stay, so this is never given back.
                self.meter.hold(4 * size_of::<Value>())?;
                let name = Value::str(name, &self.meter)?;
                attributes.push((name, value));
            }
        }
        Ok(())
    }

    // Statements.

    fn block(&mut self, statements: &'p [Stmt]) -> Result<Flow, Fault> {
        self.enter()?;
        let mut flow = Flow::Next;
        for statement in statements {
            self.meter.work(1)?;
            flow = match statement {
                Stmt::Text(text) => {
                    self.write_str(text)?;
                    Flow::Next
                }
                Stmt::Emit(line, value) => {
                    self.line = *line;
                    let value = self.eval(value)?;
                    self.write(&value)?;
                    Flow::Next
                }
                Stmt::If(branches, otherwise) => self.branch(branches, otherwise)?,
                Stmt::Set(line, target, value) => {
                    self.line = *line;
                    let value = self.eval(value)?;
                    self.assign(target, value)?;
                    Flow::Next
                }
                Stmt::For(line, at) => {
                    self.line = *line;
                    self.for_loop(*at)?;
                    Flow::Next
                }
                Stmt::Break => Flow::Break,
                Stmt::Continue => Flow::Continue,
                other => self.rare(other)?,
            };
            if flow != Flow::Next {
                break;
            }
        }
        self.leave();
        Ok(flow)
    }

    #[inline(never)]
    fn branch(
        &mut self,
        branches: &'p [(u32, Expr, Vec<Stmt>)],
        otherwise: &'p [Stmt],
    ) -> Result<Flow, Fault> {
        for (line, test, body) in branches {
            self.line = *line;
            if self.eval(test)?.is_true() {
                return self.block(body);
            }
        }
        self.block(otherwise)
    }

    #[inline(never)]
    fn rare(&mut self, statement: &'p Stmt) -> Result<Flow, Fault> {
        match statement {
            Stmt::Do(line, value) => {
                self.line = *line;
                self.eval(value)?;
            }
            Stmt::SetBlock(line, target, filters, body) => {
                self.begin_output()?;
                let flow = self.block(body)?;
                self.line = *line;
                let value = self.end_output();
                let value = self.links(value, filters)?;
                self.assign(target, value)?;
                return Ok(flow);
            }
            Stmt::Filter(line, filters, body) => {
                self.begin_output()?;
                let flow = self.block(body)?;
                self.line = *line;
                let value = self.end_output();
                let value = self.links(value, filters)?;
                self.write(&value)?;
                return Ok(flow);
            }
            Stmt::With(line, values, body) => {
                self.line = *line;
                return self.scoped(false, |this| {
                    for (target, value) in values {
                        let value = this.eval(value)?;
                        this.assign(target, value)?;
                    }
                    this.block(body)
                });
            }
            Stmt::Macro(at) => {
                let value = self.close_over(*at)?;
                self.store(self.program.macros[*at].name, value)?;
            }
            Stmt::Call(line, at, call) => {
                self.line = *line;
                let caller = self.close_over(*at)?;
                let value = self.call_block(call, caller)?;
                self.write(&value)?;
            }
            Stmt::Block(body) => return self.block(body),
            _ => {}
        }
        Ok(Flow::Next)
    }

    #[inline(never)]
    fn for_loop(&mut self, at: usize) -> Result<(), Fault> {
        let items = self.eval(&self.program.loops[at].items)?;
        self.iterate(at, &items, 0)
    }

    /// Carries out a loop over `items`.
    #[inline(never)]
    fn iterate(&mut self, at: usize, items: &Value, level: usize) -> Result<(), Fault> {
        let program = self.program;
        let description = &program.loops[at];
        let mut items = self.items(items)?;
        if let Some(condition) = &description.condition {
            items = self.scoped(false, |this| {
                let mut kept = List::new(&this.meter)?;
                for item in items.items() {
                    this.assign(&description.target, item.clone())?;
                    if this.eval(condition)?.is_true() {
                        kept.push(item.clone())?;
                    }
                }
                Ok(Rc::new(kept))
            })?;
        }
        if items.items().is_empty() {
            self.scoped(false, |this| this.block(&description.otherwise))?;
            return Ok(());
        }
        let state = Rc::new(LoopValue {
            at,
            items,
            index: Cell::new(0),
            level,
            changed: Cell::new(None),
        });
        for (index, item) in state.items.items().iter().enumerate() {
            self.meter.work(3)?;
            state.index.set(index);
            let flow = self.scoped(false, |this| {
                if let Some(name) = this.loop_name {
                    this.store(name, Value::Loop(Rc::clone(&state)))?;
                }
                this.assign(&description.target, item.clone())?;
                this.block(&description.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// `loop(items)`: what the loop writes for others.
    #[inline(never)]
    fn recurse(&mut self, inner: &LoopValue, args: &mut Args) -> Result<Value, Fault> {
        if !self.program.loops[inner.at].recursive {
            return Err(Fault::new(
                "`loop` is called in a loop that isn't recursive",
            ));
        }
        let items = args.required("items")?;
        args.done()?;
        self.enter()?;
        self.begin_output()?;
        self.iterate(inner.at, &items, inner.level + 1)?;
        self.leave();
        Ok(self.end_output())
    }

    // Macros.

    /// A macro with the variables of the blocks around it.
    #[inline(never)]
    fn close_over(&mut self, at: usize) -> Result<Value, Fault> {
        let mut captured: Vec<(NameId, Value)> = Vec::new();
        let mut depth = 1;
        let first = self.frames.iter().rposition(|frame| frame.is_macro);
        let frames = &self.frames[first.unwrap_or(0)..];
        let n: usize = frames.iter().map(|frame| frame.variables.len()).sum();
        self.meter.work(n)?;
        let hold = Hold::new(&self.meter, 64 + n * 2 * size_of::<Value>())?;
        for (id, value) in frames.iter().flat_map(|frame| &frame.variables) {
            // It finds itself under its own name, not what was called so before.
            let description = &self.program.macros[at];
            if *id == description.name && !description.is_caller {
                continue;
            }
            depth = depth.max(value.depth() + 1);
            captured.push((*id, value.clone()));
        }
        if depth > value::MAX_DEPTH {
            return Err(Fault::new(format!(
                "macros keep values deeper than {} levels",
                value::MAX_DEPTH
            )));
        }
        Ok(Value::Macro(Rc::new(MacroValue {
            at,
            captured,
            depth,
            _hold: hold,
        })))
    }

    #[inline(never)]
    fn call_block(&mut self, call: &'p Expr, caller: Value) -> Result<Value, Fault> {
        let Expr::Chain(base, links) = call else {
            return Err(Fault::new("expected a call of a macro behind `call`"));
        };
        let Some((Link::Call(arguments) | Link::Method(_, arguments), before)) = links.split_last()
        else {
            return Err(Fault::new("expected a call of a macro behind `call`"));
        };
        let value = self.eval(base)?;
        let mut value = self.links(value, before)?;
        if let Some(Link::Method(name, _)) = links.last() {
            value = self.attribute(&value, &self.program.names[*name as usize])?;
        }
        let mut args = self.arguments(arguments)?;
        let name = Value::str("caller", &self.meter)?;
        args.named.push((name, caller));
        self.call(&value, &mut args)
    }

    #[inline(never)]
    fn call_macro(&mut self, value: &Rc<MacroValue>, args: &mut Args) -> Result<Value, Fault> {
        let program = self.program;
        let description = &program.macros[value.at];
        self.enter()?;
        self.begin_output()?;
        self.meter.work(value.captured.len() / 4)?;
        let hold = Hold::new(&self.meter, value.captured.len() * 2 * size_of::<Value>())?;
        let line = self.line;
        self.scoped(true, |this| {
            if let Some(frame) = this.frames.last_mut() {
                frame.variables.extend(value.captured.iter().cloned());
            }
            if !description.is_caller {
                this.store(description.name, Value::Macro(Rc::clone(value)))?;
            }
            // Parameters hide what was captured.
            this.scoped(false, |this| {
                for (id, default) in &description.parameters {
                    let given = args.next(&program.names[*id as usize])?;
                    let value = match (given, default) {
                        (Some(value), _) if !value.is_undefined() => value,
                        (_, Some(default)) => this.eval(default)?,
                        (given, None) => given.unwrap_or(Value::Undefined),
                    };
                    this.store(*id, value)?;
                }
                let caller = args.take("caller")?;
                if let (Some(caller), Some(name)) = (caller, this.caller_name) {
                    this.store(name, caller)?;
                }
                args.done()?;
                this.block(&description.body)
            })
        })?;
        drop(hold);
        self.line = line;
        self.leave();
        Ok(self.end_output())
    }

    // Expressions.

    pub(super) fn eval(&mut self, expr: &'p Expr) -> Result<Value, Fault> {
        self.meter.work(1)?;
        match expr {
            Expr::Literal(at) => self.literal(*at),
            Expr::Name(id) => self.lookup(*id),
            other => {
                self.enter()?;
                let value = self.compound(other)?;
                self.leave();
                Ok(value)
            }
        }
    }

    fn literal(&mut self, at: u32) -> Result<Value, Fault> {
        let at = at as usize;
        if let Some(value) = &self.literals[at] {
            return Ok(value.clone());
        }
        let value = match &self.program.literals[at] {
            Literal::None => Value::None,
            Literal::Bool(value) => Value::Bool(*value),
            Literal::Int(number) => Value::Int(*number),
            Literal::Float(number) => Value::Float(*number),
            Literal::Str(text) => Value::str(text, &self.meter)?,
        };
        self.literals[at] = Some(value.clone());
        Ok(value)
    }

    fn compound(&mut self, expr: &'p Expr) -> Result<Value, Fault> {
        match expr {
            Expr::Chain(base, links) => {
                let value = self.eval(base)?;
                self.links(value, links)
            }
            Expr::And(operands) | Expr::Or(operands) => {
                let stops = matches!(expr, Expr::Or(_));
                let mut value = Value::Undefined;
                for operand in operands {
                    value = self.eval(operand)?;
                    if value.is_true() == stops {
                        break;
                    }
                }
                Ok(value)
            }
            Expr::Not(operand, odd) => {
                let value = self.eval(operand)?.is_true();
                Ok(Value::Bool(value != *odd))
            }
            Expr::Compare(first, others) => self.comparison(first, others),
            Expr::If(branches, otherwise) => {
                for (value, test) in branches {
                    if self.eval(test)?.is_true() {
                        return self.eval(value);
                    }
                }
                match otherwise {
                    Some(value) => self.eval(value),
                    None => Ok(Value::Undefined),
                }
            }
            Expr::Binary(first, others) => self.binary(first, others),
            other => self.composed(other),
        }
    }

    #[inline(never)]
    fn composed(&mut self, expr: &'p Expr) -> Result<Value, Fault> {
        match expr {
            Expr::List(items) | Expr::Tuple(items) => {
                let mut list = List::new(&self.meter)?;
                for item in items {
                    list.push(self.eval(item)?)?;
                }
                Ok(match expr {
                    Expr::Tuple(_) => list.into_tuple(),
                    _ => list.into_value(),
                })
            }
            Expr::Map(entries) => {
                let meter = Rc::clone(&self.meter);
                let pairs = entries.iter();
                let pairs = pairs.map(|(key, value)| Ok((self.eval(key)?, self.eval(value)?)));
                Ok(Value::Map(Rc::new(Map::new(&meter, pairs)?)))
            }
            Expr::Negate(operand, odd) => {
                let value = self.eval(operand)?;
                operators::negate(&value, *odd)
            }
            _ => Ok(Value::Undefined),
        }
    }

    #[inline(never)]
    fn binary(&mut self, first: &'p Expr, others: &'p [(BinaryOp, Expr)]) -> Result<Value, Fault> {
        let mut left = self.eval(first)?;
        if others.iter().all(|(op, _)| *op == BinaryOp::Concat) {
            let mut text = Text::new(&self.meter)?;
            self.print(&left, &mut text)?;
            for (_, other) in others {
                let right = self.eval(other)?;
                self.print(&right, &mut text)?;
            }
            return Ok(text.into_value());
        }
        for (op, other) in others {
            let right = self.eval(other)?;
            left = self.operate(*op, &left, &right)?;
        }
        Ok(left)
    }

    #[inline(never)]
    fn comparison(
        &mut self,
        first: &'p Expr,
        others: &'p [(CompareOp, Expr)],
    ) -> Result<Value, Fault> {
        let mut left = self.eval(first)?;
        for (op, other) in others {
            let right = self.eval(other)?;
            let meter = &self.meter;
            let holds = match op {
                CompareOp::Equal => value::equal(&left, &right, meter)?,
                CompareOp::NotEqual => !value::equal(&left, &right, meter)?,
                CompareOp::In => self.contains(&right, &left)?,
                CompareOp::NotIn => !self.contains(&right, &left)?,
                order => {
                    let found = value::compare(&left, &right, meter)?;
                    match order {
                        CompareOp::Less => found == Ordering::Less,
                        CompareOp::LessOrEqual => found != Ordering::Greater,
                        CompareOp::Greater => found == Ordering::Greater,
                        _ => found != Ordering::Less,
                    }
                }
            };
            if !holds {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// What a chain of attributes, subscripts, calls, filters and tests makes of a value.
    fn links(&mut self, mut value: Value, links: &'p [Link]) -> Result<Value, Fault> {
        for link in links {
            self.meter.work(1)?;
            value = self.link(value, link)?;
        }
        Ok(value)
    }

    #[inline(never)]
    fn link(&mut self, value: Value, link: &'p Link) -> Result<Value, Fault> {
        let program = self.program;
        let name = |id: &NameId| program.names[*id as usize].as_str();
        match link {
            Link::Attribute(id) => self.attribute(&value, name(id)),
            Link::Item(index) => {
                let index = self.eval(index)?;
                self.item(&value, &index)
            }
            Link::Slice(bounds) => self.slice_link(&value, bounds),
            Link::Call(arguments) => {
                self.meter.work(4)?;
                let mut args = self.arguments(arguments)?;
                self.call(&value, &mut args)
            }
            Link::Method(id, arguments) => {
                self.meter.work(4)?;
                let mut args = self.arguments(arguments)?;
                self.method(&value, name(id), &mut args)
            }
            Link::Filter(id, arguments) => {
                self.meter.work(4)?;
                let mut args = self.arguments(arguments)?;
                self.filter(name(id), value, &mut args)
            }
            Link::Test(id, arguments, negated) => {
                let mut args = self.arguments(arguments)?;
                let holds = self.test(name(id), &value, &mut args)?;
                Ok(Value::Bool(holds != *negated))
            }
        }
    }

    #[inline(never)]
    fn slice_link(&mut self, value: &Value, bounds: &'p [Option<Expr>; 3]) -> Result<Value, Fault> {
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            let Some(bound) = bound else {
                continue;
            };
            *number = match self.eval(bound)? {
                Value::None => None,
                other => match other.as_int() {
                    Some(number) => Some(number),
                    None => {
                        return Err(Fault::new(format!(
                            "expected numbers in a slice, found {}",
                            other.kind()
                        )));
                    }
                },
            };
        }
        self.slice(value, numbers)
    }

    #[inline(never)]
    fn arguments(&mut self, arguments: &'p [Argument]) -> Result<Args, Fault> {
        let mut args = Args::default();
        for argument in arguments {
            match argument {
                Argument::Positional(value) => args.positional.push(self.eval(value)?),
                Argument::Named(name, value) => {
                    let name = self.literal(*name)?;
                    args.named.push((name, self.eval(value)?));
                }
                Argument::Splat(value) => {
                    let value = self.eval(value)?;
                    let items = self.items(&value)?;
                    if items.items().len() > MAX_ARGUMENTS {
                        return Err(too_many());
                    }
                    args.positional.extend_from_slice(items.items());
                }
                Argument::NamedSplat(value) => {
                    let Value::Map(map) = self.eval(value)? else {
                        return Err(Fault::new("expected a map behind `**`"));
                    };
                    if map.entries().len() > MAX_ARGUMENTS {
                        return Err(too_many());
                    }
                    args.named.extend_from_slice(map.entries());
                }
            }
            if args.positional.len() + args.named.len() > MAX_ARGUMENTS {
                return Err(too_many());
            }
        }
        args.positional.reverse();
        self.meter.work(args.positional.len() / 4)?;
        Ok(args)
    }

    #[inline(never)]
    pub(super) fn call(&mut self, value: &Value, args: &mut Args) -> Result<Value, Fault> {
        match value {
            Value::Macro(value) => {
                let value = Rc::clone(value);
                self.call_macro(&value, args)
            }
            Value::Function(name) => self.function(name, args),
            Value::Loop(value) => {
                let value = Rc::clone(value);
                self.recurse(&value, args)
            }
            Value::Joiner(joiner) => {
                args.done()?;
                match joiner.used.replace(true) {
                    true => Ok(joiner.separator.clone()),
                    false => Value::str("", &self.meter),
                }
            }
            other => Err(Fault::new(format!(
                "a value of kind {} can't be called",
                other.kind()
            ))),
        }
    }

    /// `loop.changed(…)`: whether its arguments differ from those of the time before.
    pub(super) fn loop_changed(
        &mut self,
        value: &LoopValue,
        args: &mut Args,
    ) -> Result<Value, Fault> {
        let asked = Value::tuple(args.rest(), &self.meter)?;
        let Some(at) = value.changed.get() else {
            self.meter.hold(2 * size_of::<Value>())?;
            value.changed.set(Some(self.changed.len()));
            self.changed.push(asked);
            return Ok(Value::Bool(true));
        };
        let changed = !value::equal(&self.changed[at], &asked, &self.meter)?;
        self.changed[at] = asked;
        Ok(Value::Bool(changed))
    }

    /// A new namespace.
    pub(super) fn namespace(&mut self, attributes: Vec<(Value, Value)>) -> Result<Value, Fault> {
        self.meter.hold(64)?;
        let at = self.namespaces.len();
        self.namespaces.push(Vec::new());
        for (name, value) in attributes {
            self.set_attribute(at, name.as_str().unwrap_or_default(), value)?;
        }
        Ok(Value::Namespace(at))
    }

    /// Whether there is a test of this name, asked for `x is test`.
    pub(super) fn has_test(name: &str) -> bool {
        predicates::NAMES.contains(&name)
    }
}

fn too_many() -> Fault {
    Fault::new(format!("more than {MAX_ARGUMENTS} arguments"))
}
