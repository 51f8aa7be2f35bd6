//! A session in a container: exec over a websocket, `v5.channel.k8s.io`, in which stdin can be
//! closed while the rest goes on.
//!
//! When the connection ends, whoever ends it, the kubelet ends the program's stdin, and so
//! releases the application.

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
use crate::host::session::Heard;
use crate::host::{Session, SessionState};

/// One that was let go and isn't looked at any more is waited for so long.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);
/// After its end, what it has said is read for so long.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A session in a container.
pub(super) struct Exec {
    heard: Arc<Mutex<Told>>,
    /// Dropped, it ends stdin.
    stdin: Option<oneshot::Sender<()>>,
    following: JoinHandle<()>,
}

/// What is known of it.
#[derive(Default)]
struct Told {
    heard: Heard,
    ended: Option<(bool, String)>,
}

/// Starts the program of a hook; for at most `limit`.
pub(super) async fn start(
    client: &Client,
    rights: &HookRights,
    found: &Found,
    limit: Duration,
) -> Result<Exec> {
    let failed = |reason: String| Error::QuiesceFailed {
        hook: found.name(),
        reason,
    };
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
    let heard = Arc::default();
    let (stdin, let_go) = oneshot::channel();
    let following = tokio::spawn(follow(process, Arc::clone(&heard), let_go));
    Ok(Exec {
        heard,
        stdin: Some(stdin),
        following,
    })
}

/// Why it can't be started.
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

/// Takes what comes, until the end.
async fn follow(
    mut process: AttachedProcess,
    told: Arc<Mutex<Told>>,
    mut let_go: oneshot::Receiver<()>,
) {
    let (Some(mut stdin), Some(mut stdout), Some(mut stderr), Some(status)) = (
        process.stdin(),
        process.stdout(),
        process.stderr(),
        process.take_status(),
    ) else {
        record_exit(&told, false, "the response has no streams".into());
        return;
    };
    let mut status = std::pin::pin!(status);
    let mut last_words = std::pin::pin!(tokio::time::sleep(Duration::from_secs(u32::MAX.into())));
    let (mut out, mut err) = ([0; 1024], [0; 1024]);
    let mut holds = true;
    let ended = loop {
        tokio::select! {
            _ = &mut let_go, if holds => {
                holds = false;
                // To end only one's own half: dropping it tells nobody.
                let _ = stdin.shutdown().await;
                last_words.as_mut().reset(tokio::time::Instant::now() + RELEASE_TIMEOUT);
            }
            Ok(bytes) = stdout.read(&mut out) => lock(&told).heard.stdout(&out[..bytes]),
            Ok(bytes) = stderr.read(&mut err) => lock(&told).heard.stderr(&err[..bytes]),
            ended = &mut status => break ended,
            () = &mut last_words => break None,
        }
    };
    let rest = async {
        drain(&mut stdout, |bytes| lock(&told).heard.stdout(bytes)).await;
        drain(&mut stderr, |bytes| lock(&told).heard.stderr(bytes)).await;
    };
    // What it said last comes before its end; without an orderly end nobody closes these.
    let _ = tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, rest).await;
    let (success, text) = match ended {
        Some(status) => outcome(&status),
        None => (false, "connection loss".into()),
    };
    record_exit(&told, success, text);
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

/// Whether a program ended well, and its exit status for people.
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

fn record_exit(told: &Mutex<Told>, success: bool, status: String) {
    lock(told).ended.get_or_insert((success, status));
}

fn lock(told: &Mutex<Told>) -> std::sync::MutexGuard<'_, Told> {
    told.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session for Exec {
    fn poll(&mut self) -> SessionState {
        let told = lock(&self.heard);
        let was_ready = told.heard.is_ready();
        match &told.ended {
            Some((success, status)) => SessionState::Ended {
                was_ready,
                success: *success,
                status: status.clone(),
            },
            None if was_ready => SessionState::Ready,
            None => SessionState::Starting,
        }
    }

    fn said(&self) -> String {
        lock(&self.heard).heard.said()
    }

    fn let_go(&mut self) {
        self.stdin = None;
    }

    /// There are no signals into a container: the connection is given up.
    fn kill(&mut self, _by_force: bool) {
        self.stdin = None;
        self.following.abort();
        record_exit(&self.heard, false, "an unknown exit status".into());
    }
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec").finish_non_exhaustive()
    }
}
