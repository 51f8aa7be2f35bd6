//! Why a command failed, and its exit code (docs/plugin.md).

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;

/// A request failed, or the command did not reach its end.
pub const FAILED: u8 = 1;
/// Permissions are missing; nothing was changed.
pub const DENIED: u8 = 3;
/// The user has not confirmed the change with `--yes`; nothing was changed.
pub const UNCONFIRMED: u8 = 4;
/// The time of `--timeout` is over; the operation goes on.
pub const TIMED_OUT: u8 = 5;
/// The command line is wrong: EX_USAGE of sysexits.h, as of the driver.
pub const USAGE: u8 = 64;

/// Why a command failed.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    /// What is printed.
    pub message: String,
}

impl Failure {
    /// A request failed.
    pub fn failed(message: String) -> Failure {
        Failure {
            code: FAILED,
            message,
        }
    }

    /// Permissions are missing.
    pub fn denied(message: String) -> Failure {
        Failure {
            code: DENIED,
            message,
        }
    }

    /// The command line is wrong.
    pub fn usage(message: String) -> Failure {
        Failure {
            code: USAGE,
            message,
        }
    }

    /// What the API server or the connection answered to `action`.
    pub fn of(action: &str, error: &kube::Error) -> Failure {
        match error {
            kube::Error::Api(status) if status.code == 403 => {
                Failure::denied(format!("{action}: {}", status.message))
            }
            kube::Error::Api(status) => Failure::failed(format!("{action}: {}", status.message)),
            error => Failure::failed(format!("{action}: {}", chain(error))),
        }
    }
}

/// The error and its sources, each once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !said.contains(&next) {
            said = format!("{said}: {next}");
        }
        source = error.source();
    }
    said
}
