//! A session in a container: exec over a websocket with `v5.channel.k8s.io`, which can close stdin
//! while the other streams stay open.
//!
//! When the connection ends on either side, the kubelet closes the program's stdin, and so releases
//! the application.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::kube::api::{Api, AttachParams, AttachedProcess};
use ::kube::client::UpgradeConnectionError;
use ::kube::{Client, Error as KubeError};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Found, HookRights, is_forbidden};
use crate::error::{Error, Result, chain};
use crate::host::session::SessionOutput;
use crate::host::{Session, SessionState};

/// How long to wait for a program whose stdin was closed and that is no longer polled.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long its remaining output is read after it has exited.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A session in a container.
pub(super) struct Exec {
    state: Arc<Mutex<ExecState>>,
    /// Dropping it closes stdin.
    stdin: Option<oneshot::Sender<()>>,
    following: JoinHandle<()>,
}

/// The known state of a session.
#[derive(Default)]
struct ExecState {
    output: SessionOutput,
    ended: Option<(bool, String)>,
}

/// Starts the program of a hook, with a time limit.
pub(super) async fn start(
    client: &Client,
    rights: &HookRights,
    found: &Found,
    limit: Duration,
) -> Result<Exec> {
    let failed = |reason: String| Error::quiesce_failed(found.name(), reason);
    let api = Api::<Pod>::namespaced(client.clone(), &found.namespace);
    let attach = AttachParams::default()
        .container(&found.hook.container)
        .stdin(true)
        .stdout(true)
        .stderr(true)
        .tty(false);
    let started = api.exec(&found.pod, found.hook.command.clone(), &attach);
    let process = match tokio::time::timeout(limit, started).await {
        Ok(Ok(process)) => process,
        Ok(Err(error)) => return Err(failed(refusal(&error, rights, &found.namespace))),
        Err(_) => {
            let limit = limit.as_millis();
            return Err(failed(format!(
                "its program did not start within {limit} ms"
            )));
        }
    };
    let state = Arc::default();
    let (stdin, closed) = oneshot::channel();
    let following = tokio::spawn(follow(process, Arc::clone(&state), closed));
    Ok(Exec {
        state,
        stdin: Some(stdin),
        following,
    })
}

/// The reason why it cannot be started.
fn refusal(error: &KubeError, rights: &HookRights, namespace: &str) -> String {
    let code = match error {
        KubeError::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(code)) => code.as_u16(),
        _ => 0,
    };
    match code {
        _ if is_forbidden(error) => rights.advice("exec into its pod", namespace),
        403 => rights.advice("exec into its pod", namespace),
        404 => "its pod was deleted".into(),
        _ => format!("its program cannot be started: {}", chain(error)),
    }
}

/// Processes events and output until the end.
async fn follow(
    mut process: AttachedProcess,
    state: Arc<Mutex<ExecState>>,
    mut closed: oneshot::Receiver<()>,
) {
    let (Some(mut stdin), Some(mut stdout), Some(mut stderr), Some(status)) = (
        process.stdin(),
        process.stdout(),
        process.stderr(),
        process.take_status(),
    ) else {
        record_exit(&state, false, "the response has no streams".into());
        return;
    };
    let mut status = std::pin::pin!(status);
    let mut deadline = std::pin::pin!(tokio::time::sleep(Duration::from_secs(u32::MAX.into())));
    let (mut out, mut err) = ([0; 1024], [0; 1024]);
    let mut holds = true;
    let ended = loop {
        tokio::select! {
            _ = &mut closed, if holds => {
                holds = false;
                // Close only this direction: dropping the stream would not notify the other end.
                let _ = stdin.shutdown().await;
                deadline.as_mut().reset(tokio::time::Instant::now() + RELEASE_TIMEOUT);
            }
            Ok(bytes) = stdout.read(&mut out) => lock(&state).output.stdout(&out[..bytes]),
            Ok(bytes) = stderr.read(&mut err) => lock(&state).output.stderr(&err[..bytes]),
            ended = &mut status => break ended,
            () = &mut deadline => break None,
        }
    };
    let rest = async {
        drain(&mut stdout, |bytes| lock(&state).output.stdout(bytes)).await;
        drain(&mut stderr, |bytes| lock(&state).output.stderr(bytes)).await;
    };
    // The last output arrives before the exit status; without a normal exit these streams are never
    // closed.
    let _ = tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, rest).await;
    let (success, text) = match ended {
        Some(status) => outcome(&status),
        None => (false, "connection loss".into()),
    };
    record_exit(&state, success, text);
}

async fn drain(pipe: &mut (impl AsyncRead + Unpin), mut take: impl FnMut(&[u8])) {
    let mut piece = [0; 1024];
    while let Ok(bytes) = pipe.read(&mut piece).await {
        if bytes == 0 {
            return;
        }
        take(&piece[..bytes]);
    }
}

/// Whether a program succeeded, and its exit status as text.
fn outcome(status: &Status) -> (bool, String) {
    if status.status.as_deref() == Some("Success") {
        return (true, "exit status: 0".into());
    }
    let causes = status
        .details
        .iter()
        .flat_map(|details| details.causes.iter().flatten());
    let mut codes = causes.filter(|cause| cause.reason.as_deref() == Some("ExitCode"));
    match codes.next().and_then(|cause| cause.message.as_deref()) {
        Some(code) => (false, format!("exit status: {code}")),
        None => (
            false,
            format!(
                "an error: {}",
                status.message.as_deref().unwrap_or("unknown")
            ),
        ),
    }
}

fn record_exit(state: &Mutex<ExecState>, success: bool, status: String) {
    lock(state).ended.get_or_insert((success, status));
}

fn lock(state: &Mutex<ExecState>) -> std::sync::MutexGuard<'_, ExecState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session for Exec {
    fn poll(&mut self) -> SessionState {
        let state = lock(&self.state);
        let was_ready = state.output.is_ready();
        match &state.ended {
            Some((success, status)) => SessionState::Ended {
                was_ready,
                success: *success,
                status: status.clone(),
            },
            None if was_ready => SessionState::Ready,
            None => SessionState::Starting,
        }
    }

    fn stderr_excerpt(&self) -> String {
        lock(&self.state).output.stderr_excerpt()
    }

    fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// No signal can be sent to a container, so the connection is closed.
    fn kill(&mut self, _by_force: bool) {
        self.stdin = None;
        self.following.abort();
        record_exit(&self.state, false, "an unknown exit status".into());
    }
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec").finish_non_exhaustive()
    }
}
