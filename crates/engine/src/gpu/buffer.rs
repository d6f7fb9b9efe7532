//! Activations on the device.

use sterna_gpu::graph::{Graph, Op, View};
use sterna_gpu::kernels::linear::Ids;
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, GpuError};

use crate::backend::BackendError;

/// Rows of activations on the device. Their memory is reused from step to step.
#[derive(Debug, Default)]
pub struct GpuBuffer {
    own: Option<Buffer>,
    /// For rows gathered from others.
    spare: Option<Buffer>,
    ids: Option<Buffer>,
    /// Where the rows are: in `own`, in `spare`, or next to others in the memory of those.
    view: Option<View>,
}

impl GpuBuffer {
    /// Room for `n_rows` of `width`, with unspecified contents.
    pub(super) fn shape(
        &mut self,
        device: &Device,
        n_rows: usize,
        width: usize,
    ) -> Result<View, GpuError> {
        let buffer = room(device, &mut self.own, n_rows * width)?;
        let view = View::new(&buffer, n_rows, width);
        self.set(view.clone());
        Ok(view)
    }

    /// From now on the rows are `view`.
    pub(super) fn set(&mut self, view: View) {
        self.view = Some(view);
    }

    /// The rows.
    pub(super) fn view(&self) -> Result<&View, BackendError> {
        self.view.as_ref().ok_or_else(|| {
            BackendError::from(GpuError::Shape {
                what: "rows of an operand",
                expected: 1,
                found: 0,
            })
        })
    }

    /// Writes `ids` where an embedding reads them.
    pub(super) fn write_ids(&mut self, device: &Device, ids: &[u32]) -> Result<Ids, GpuError> {
        let buffer = room(device, &mut self.ids, ids.len())?;
        device.write(&buffer, 0, ids)?;
        Ok(Ids {
            buffer,
            offset: 0,
            stride: 1,
        })
    }

    /// Writes `values` in place, if they are as many rows of the same width, else to memory of its own.
    pub(super) fn overwrite(
        &mut self,
        device: &Device,
        values: &[f32],
        width: usize,
    ) -> Result<(), BackendError> {
        let n_rows = values.len().checked_div(width).unwrap_or(0);
        let view = match &self.view {
            Some(view) if (view.n_rows, view.width) == (n_rows, width) => view.clone(),
            _ => self.shape(device, n_rows, width)?,
        };
        self.set(view.clone());
        // Contiguous rows are written at once.
        let n_together = if view.stride == width { n_rows } else { 1 };
        let runs = values.chunks((n_together * width).max(1));
        for (i, run) in runs.enumerate() {
            let offset = view.offset + i * view.stride;
            device.write(&view.buffer, offset as u64 * 4, run)?;
        }
        Ok(())
    }

    /// Room for other rows than these, which stay as they are, unless they are in this buffer's spare memory.
    pub(super) fn scratch(
        &mut self,
        device: &Device,
        n_rows: usize,
        width: usize,
    ) -> Result<View, GpuError> {
        let buffer = room(device, &mut self.spare, n_rows * width)?;
        Ok(View::new(&buffer, n_rows, width))
    }

    /// `parts`, queries, keys and values, as columns of the same rows: in place, or copied to this buffer's spare
    /// memory. There is at least one.
    pub(super) fn side_by_side(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        parts: &[&GpuBuffer],
    ) -> Result<View, BackendError> {
        let parts = (parts.iter().map(|part| part.view())).collect::<Result<Vec<_>, _>>()?;
        let width = parts.iter().map(|part| part.width).sum();
        let columns_of = |whole: &View| -> Vec<View> {
            let mut first = 0;
            let next = parts.iter().map(|part| {
                first += part.width;
                whole.columns(first - part.width, part.width)
            });
            next.collect()
        };
        let whole = View {
            width,
            ..parts[0].clone()
        };
        if whole.stride >= width && columns_of(&whole).iter().eq(parts.iter().copied()) {
            return Ok(whole);
        }
        let buffer = room(device, &mut self.spare, whole.n_rows * width)?;
        let whole = View::new(&buffer, whole.n_rows, width);
        for (x, part) in columns_of(&whole).into_iter().zip(parts) {
            let y = part.clone();
            graph.push(Op::Copy { x, y });
        }
        Ok(whole)
    }

    /// Keeps only the rows `rows`, in ascending order.
    pub(super) fn keep_rows(
        &mut self,
        device: &Device,
        graph: &mut Graph,
        rows: &[usize],
    ) -> Result<(), BackendError> {
        let view = self.view()?.clone();
        let first = rows.first().copied().unwrap_or(0);
        if rows.iter().copied().eq(first..first + rows.len()) {
            self.set(view.rows(first, rows.len()));
            return Ok(());
        }
        let buffer = room(device, &mut self.spare, rows.len() * view.width)?;
        let kept = View::new(&buffer, rows.len(), view.width);
        let mut to = 0;
        for run in rows.chunk_by(|a, b| a + 1 == *b) {
            graph.push(Op::Copy {
                x: kept.rows(to, run.len()),
                y: view.rows(run[0], run.len()),
            });
            to += run.len();
        }
        // The next rows to be kept may be among these.
        std::mem::swap(&mut self.own, &mut self.spare);
        self.set(kept);
        Ok(())
    }

    /// The rows, contiguous.
    pub(super) fn dense(
        &mut self,
        device: &Device,
        graph: &mut Graph,
    ) -> Result<View, BackendError> {
        let view = self.view()?.clone();
        if view.stride == view.width || view.n_rows <= 1 {
            return Ok(view);
        }
        let buffer = room(device, &mut self.spare, view.n_rows * view.width)?;
        let dense = View::new(&buffer, view.n_rows, view.width);
        graph.push(Op::Copy {
            x: dense.clone(),
            y: view,
        });
        Ok(dense)
    }
}

/// Memory for `len` words: that of `kept` while it is large enough.
pub(super) fn room(
    device: &Device,
    kept: &mut Option<Buffer>,
    len: usize,
) -> Result<Buffer, GpuError> {
    let bytes = (len as u64).saturating_mul(4);
    match kept {
        Some(buffer) if buffer.bytes() >= bytes => Ok(buffer.clone()),
        _ => Ok(kept.insert(device.buffer("activations", bytes)?).clone()),
    }
}

/// The heads of rows that are next to one another, as rows.
pub(super) fn heads(rows: &View, n_heads: usize) -> Result<View, GpuError> {
    if rows.n_rows > 1 && rows.stride != rows.width {
        return Err(GpuError::Shape {
            what: "heads: from row to row",
            expected: rows.width as u64,
            found: rows.stride as u64,
        });
    }
    let width = rows.width / n_heads.max(1);
    Ok(View {
        n_rows: rows.n_rows * n_heads,
        width,
        stride: width,
        ..rows.clone()
    })
}
