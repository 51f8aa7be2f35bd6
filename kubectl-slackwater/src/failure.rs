//! Why a command failed, and its exit code (docs/plugin.md).

use kube::client::AuthError;

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
    /// An object has changed since it was read, or exists already: nothing was stored.
    pub is_conflict: bool,
    /// The API server or the connection to it failed: the same request may succeed later.
    pub is_transient: bool,
}

impl Failure {
    /// A request failed.
    pub fn failed(message: String) -> Failure {
        Failure {
            code: FAILED,
            message,
            is_conflict: false,
            is_transient: false,
        }
    }

    /// Permissions are missing.
    pub fn denied(message: String) -> Failure {
        Failure {
            code: DENIED,
            ..Failure::failed(message)
        }
    }

    /// The user has not confirmed the change.
    pub fn unconfirmed() -> Failure {
        Failure {
            code: UNCONFIRMED,
            ..Failure::failed(
                "nothing was changed; add --yes to do this, or --dry-run to let the API server check it".into(),
            )
        }
    }

    /// The command line is wrong.
    pub fn usage(message: String) -> Failure {
        Failure {
            code: USAGE,
            ..Failure::failed(message)
        }
    }

    /// What the API server or the connection answered to `action`.
    pub fn of(action: &str, error: &kube::Error) -> Failure {
        match error {
            kube::Error::Api(status) if status.code == 403 => {
                Failure::denied(format!("{action}: {}", status.message))
            }
            kube::Error::Api(status) => Failure {
                is_conflict: status.code == 409,
                is_transient: matches!(status.code, 408 | 429 | 500..),
                ..Failure::failed(format!("{action}: {}", status.message))
            },
            // The error has the arguments, the variables and the output of the program, and so secrets.
            kube::Error::Auth(AuthError::AuthExecRun { out, .. }) => Failure::failed(format!(
                "{action}: the credential plugin of the kubeconfig failed with {}; run it by hand to see why",
                out.status
            )),
            error => Failure {
                // Not what is wrong with the kubeconfig, the user or the request.
                is_transient: matches!(error, kube::Error::HyperError(_) | kube::Error::Service(_)),
                ..Failure::failed(format!("{action}: {}", chain(error)))
            },
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_that_can_pass_are_transient() {
        let of = |code: u16| {
            let status = serde_json::json!({"status": "Failure", "message": "x", "reason": "x", "code": code});
            let status = serde_json::from_value(status).unwrap();
            Failure::of("reading", &kube::Error::Api(Box::new(status))).is_transient
        };
        for code in [408, 429, 500, 503, 504] {
            assert!(of(code), "{code}");
        }
        for code in [400, 401, 403, 404, 409, 410, 422] {
            assert!(!of(code), "{code}");
        }
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let refused = kube::Error::Service(Box::new(refused));
        assert!(Failure::of("reading", &refused).is_transient);
        assert!(!Failure::of("reading", &kube::Error::TlsRequired).is_transient);
        assert!(!Failure::usage("x".into()).is_transient);
    }

    #[test]
    fn an_error_of_a_credential_plugin_shows_no_secret() {
        let error = kube::Error::Auth(AuthError::AuthExecRun {
            cmd: "login --client-secret=hunter2".into(),
            out: Box::new(std::process::Output {
                status: std::process::ExitStatus::default(),
                stdout: b"hunter2".to_vec(),
                stderr: Vec::new(),
            }),
        });
        let message = Failure::of("connecting to the cluster", &error).message;
        assert!(message.contains("credential plugin"), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
}
