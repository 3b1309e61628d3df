//! Processes and signals, as far as the standard library has no safe call for them.

use std::process::Command;

/// Makes the process that `command` starts receive SIGTERM when its parent ends for any reason; more precisely, when
/// the thread that started the process ends (`PR_SET_PDEATHSIG`). Only Linux has such a signal; elsewhere this does
/// nothing.
///
/// ```
/// let mut command = std::process::Command::new("true");
/// overdrive_sys::process::terminate_with_parent(&mut command);
/// assert!(command.status()?.success());
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn terminate_with_parent(command: &mut Command) {
    #[cfg(target_os = "linux")]
    {
        use std::io::Error;
        use std::os::unix::process::CommandExt;

        let parent = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
        let ask = move || {
            // SAFETY: it sets an attribute of the calling process and touches no memory.
            let status =
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM as libc::c_ulong) };
            if status != 0 {
                return Err(Error::last_os_error());
            }
            // A parent that ended before the call sends no signal.
            // SAFETY: it has no arguments and cannot fail.
            if unsafe { libc::getppid() } != parent {
                return Err(Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes two system calls, which are safe in a signal handler, and
        // neither allocates nor locks: an error of the system is a number.
        unsafe {
            command.pre_exec(ask);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = command;
}

/// Returns `true` if this process ignores the signal of this number, as a program that `nohup` started does with
/// SIGHUP.
pub fn ignores_signal(signal: i32) -> bool {
    #[cfg(unix)]
    {
        // SAFETY: a plain C structure of integers, pointers and options, for which zeros are valid.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: without a new action the call only writes the present one to `action`.
        let status = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        status == 0 && action.sa_sigaction == libc::SIG_IGN
    }
    #[cfg(not(unix))]
    {
        let _ = signal;
        false
    }
}
