//! Timing dispatches by timestamps within a pass.

use std::ops::Range;

use super::{Commands, Timing, untimed};
use crate::{Device, GpuError, wgpu};

/// Dispatches that are timed in a pass: a query set has at most 4096 queries, and one is for the beginning.
const MAX_TIMED: usize = wgpu::QUERY_SET_MAX_QUERIES as usize - 1;

/// Dispatches that are timed together.
struct TimedPass<'a> {
    commands: &'a Commands,
    dispatches: Range<usize>,
    /// The time before the first, and after each.
    times: wgpu::QuerySet,
    /// The offset of these in a buffer, in bytes.
    resolved_at: u64,
}

impl TimedPass<'_> {
    fn n_times(&self) -> u32 {
        self.dispatches.len() as u32 + 1
    }

    /// Of its timestamps.
    fn bytes(&self) -> u64 {
        u64::from(self.n_times()) * u64::from(wgpu::QUERY_SIZE)
    }

    fn encode(&self, encoder: &mut wgpu::CommandEncoder, resolved: &wgpu::Buffer) {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.write_timestamp(&self.times, 0);
        let dispatches = self.dispatches.clone();
        (self.commands).encode(dispatches, &mut pass, |pass, i| {
            pass.write_timestamp(&self.times, i);
        });
        drop(pass);
        encoder.resolve_query_set(&self.times, 0..self.n_times(), resolved, self.resolved_at);
    }
}

impl Device {
    /// Runs commands and returns how long each dispatch took.
    ///
    /// Errors: [`GpuError::Unsupported`] without [`Features::timestamps`](crate::Features::timestamps);
    /// as [`Device::submit`].
    pub fn time(&self, commands: &[&Commands]) -> Result<Vec<Timing>, GpuError> {
        self.expect_timestamps()?;
        let mut passes = Vec::new();
        let mut bytes = 0;
        for commands in commands {
            for first in (0..commands.len()).step_by(MAX_TIMED) {
                let dispatches = first..commands.len().min(first + MAX_TIMED);
                let pass = TimedPass {
                    times: self.timestamps(dispatches.len() as u32 + 1)?,
                    commands,
                    dispatches,
                    resolved_at: bytes,
                };
                bytes += pass
                    .bytes()
                    .next_multiple_of(wgpu::QUERY_RESOLVE_BUFFER_ALIGNMENT);
                passes.push(pass);
            }
        }
        if passes.is_empty() {
            return Ok(Vec::new());
        }
        let ticks = self.ticks(bytes, |encoder, resolved| {
            for pass in &passes {
                pass.encode(encoder, resolved);
            }
        })?;
        let timings = passes.iter().flat_map(|pass| {
            let ticks = ticks.get(pass.resolved_at as usize / 8..);
            let ticks = ticks.unwrap_or_default().windows(2);
            let dispatches = &pass.commands.dispatches[pass.dispatches.clone()];
            dispatches
                .iter()
                .zip(ticks)
                .map(|(dispatch, ticks)| Timing {
                    name: dispatch.name,
                    grid: dispatch.grid,
                    us: self.us(ticks),
                })
        });
        Ok(timings.collect())
    }

    /// Runs commands and returns how long all of them took together, in microseconds.
    ///
    /// Errors: as [`Device::time`].
    pub fn time_together(&self, commands: &[&Commands]) -> Result<f64, GpuError> {
        self.expect_timestamps()?;
        let times = self.timestamps(2)?;
        let bytes = 2 * u64::from(wgpu::QUERY_SIZE);
        let ticks = self.ticks(bytes, |encoder, resolved| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.write_timestamp(&times, 0);
            for commands in commands {
                commands.encode(0..commands.len(), &mut pass, |_, _| {});
            }
            pass.write_timestamp(&times, 1);
            drop(pass);
            encoder.resolve_query_set(&times, 0..2, resolved, 0);
        })?;
        Ok(self.us(&ticks))
    }

    fn expect_timestamps(&self) -> Result<(), GpuError> {
        match self.features().timestamps {
            true => Ok(()),
            false => Err(untimed()),
        }
    }

    fn timestamps(&self, n: u32) -> Result<wgpu::QuerySet, GpuError> {
        self.checked("timing dispatches", || {
            self.wgpu().create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: n,
            })
        })
    }

    /// Submits what `encode` records, and reads the timestamps that it writes to a buffer of `bytes`.
    fn ticks(
        &self,
        bytes: u64,
        encode: impl FnOnce(&mut wgpu::CommandEncoder, &wgpu::Buffer),
    ) -> Result<Vec<u64>, GpuError> {
        let resolved = self.checked("timing dispatches", || {
            self.wgpu().create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            })
        })?;
        let range = 0..bytes;
        let reads = [(&resolved, &range)].into_iter();
        let submission = self.submit_with(reads, |encoder| encode(encoder, &resolved))?;
        let read = submission.wait()?;
        Ok(bytemuck::pod_collect_to_vec(
            read.first().map_or(&[], |r| &r[..]),
        ))
    }

    /// Microseconds from the first of two timestamps to the second.
    fn us(&self, ticks: &[u64]) -> f64 {
        let &[from, to] = ticks else { return 0.0 };
        to.saturating_sub(from) as f64 * f64::from(self.queue().get_timestamp_period()) / 1000.0
    }
}
