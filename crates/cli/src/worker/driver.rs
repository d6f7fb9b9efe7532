//! Who drives this process: its parent, at the other end of its standard input and output.
//!
//! A process that is killed closes its ends of both pipes, which ends a worker that reads or writes.
//! One that computes looks here. So does one that waits for input, for where some other child of the
//! killed process holds its end of the pipe open.

#[cfg(any(target_os = "linux", target_os = "macos"))]
pub(crate) use unix::Driver;

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
pub(crate) use other::Driver;

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod unix {
    use std::io;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, getppid};

    /// Longest time in which nobody notices that the parent has ended.
    const PATIENCE: Timespec = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };

    /// The process that started this one.
    ///
    /// A signal at its end (`PR_SET_PDEATHSIG`) would come sooner, but comes when the *thread* ends that
    /// started this process, and drivers start workers from threads of short life.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Driver {
        parent: Option<Pid>,
    }

    impl Driver {
        /// The present parent.
        pub(crate) fn current() -> Driver {
            Driver { parent: getppid() }
        }

        fn has_ended(self) -> bool {
            // An orphan is given another parent.
            getppid() != self.parent
        }

        /// Waits until standard input has something to read, be it its end; false if the driver has
        /// ended.
        pub(crate) fn wait_for_input(self) -> bool {
            let stdin = io::stdin();
            while !self.has_ended() {
                let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
                // What `poll` can't tell, such as an error, reading will.
                if !matches!(poll(&mut fds, Some(&PATIENCE)), Ok(0)) {
                    return true;
                }
            }
            false
        }

        /// True if the driver has ended, or has closed its end of standard output.
        pub(crate) fn is_gone(self) -> bool {
            let stdout = io::stdout();
            // Whether there is room to write is not asked; what is wrong is told in any case.
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
        /// The present parent.
        pub(crate) fn current() -> Driver {
            Driver
        }

        /// True: reading waits.
        pub(crate) fn wait_for_input(self) -> bool {
            true
        }

        /// False: writing will tell.
        pub(crate) fn is_gone(self) -> bool {
            false
        }
    }
}
