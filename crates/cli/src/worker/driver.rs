//! The driver of this process: its parent, at the other end of its standard input and output.
//!
//! When the driver is killed, the system closes its ends of both pipes, which ends a worker that reads or
//! writes. One that computes checks here. So does one that waits for input, in case another child of the
//! killed process keeps its end of the pipe open.

#[cfg(any(target_os = "linux", target_os = "macos"))]
pub(crate) use unix::Driver;

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
pub(crate) use other::Driver;

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod unix {
    use std::io;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, getppid};

    /// Maximum time until the end of the parent is noticed.
    const PATIENCE: Timespec = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };

    /// The process that started this one.
    ///
    /// A signal at its end (`PR_SET_PDEATHSIG`) would come sooner, but comes when the *thread* ends that
    /// started this process, and drivers start workers from short-lived threads.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Driver {
        parent: Option<Pid>,
    }

    impl Driver {
        /// The current parent.
        pub(crate) fn current() -> Driver {
            Driver { parent: getppid() }
        }

        fn has_ended(self) -> bool {
            // An orphan is given another parent.
            getppid() != self.parent
        }

        /// Waits until standard input is readable or at its end; false if the driver has ended.
        pub(crate) fn wait_for_input(self) -> bool {
            let stdin = io::stdin();
            while !self.has_ended() {
                let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
                // Reading will report what `poll` can't, such as an error.
                if !matches!(poll(&mut fds, Some(&PATIENCE)), Ok(0)) {
                    return true;
                }
            }
            false
        }

        /// True if the driver has ended, or has closed its end of standard output.
        pub(crate) fn is_gone(self) -> bool {
            let stdout = io::stdout();
            // Whether there is room to write is not asked; errors are reported in any case.
            let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let closed = PollFlags::ERR | PollFlags::HUP;
            let is_closed =
                poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(closed);
            is_closed || self.has_ended()
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod other {
    /// The process that started this one; here, only reading and writing show that it has ended.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Driver;

    impl Driver {
        /// The current parent.
        pub(crate) fn current() -> Driver {
            Driver
        }

        /// Always true: reading blocks.
        pub(crate) fn wait_for_input(self) -> bool {
            true
        }

        /// Always false: writing will fail.
        pub(crate) fn is_gone(self) -> bool {
            false
        }
    }
}
