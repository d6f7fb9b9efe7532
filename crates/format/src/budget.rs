//! How much memory a header may take once it is read.

/// Counts the memory that a parser is about to use, because small files can describe large things:
/// a file system stores ten gigabytes of zeros in no space at all.
///
/// Charges are estimates from above: containers at their worst growth, allocator overhead, and what
/// joining several files keeps besides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    used: u64,
    limit: u64,
}

/// A charge that doesn't fit. `need` is what was used before with the charge, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverBudget {
    pub(crate) need: u64,
    pub(crate) limit: u64,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub(crate) const fn new(limit: u64) -> Budget {
        Budget { used: 0, limit }
    }

    /// Charges `bytes`; to be called before they are allocated.
    pub(crate) fn charge(&mut self, bytes: u64) -> Result<(), OverBudget> {
        let need = self.used.saturating_add(bytes);
        if need > self.limit {
            let limit = self.limit;
            return Err(OverBudget { need, limit });
        }
        self.used = need;
        Ok(())
    }
}
