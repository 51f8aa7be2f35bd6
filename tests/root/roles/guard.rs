//! A guard in a separate process, next to a node of a cluster that cannot see it, as in two
//! containers of one pod.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use slackwater::agent::DescribeRequest;
use slackwater::agent::agent_client::AgentClient;
use slackwater::tls::Credentials;
use tonic::Code;

use crate::roles::fixture::*;
use slackwater_testkit::node::{GIB, definition, refused};
use slackwater_testkit::{
    Client, Disk, Scratch, Server, WAIT_TIMEOUT, eventually, mount, slackwater,
};

/// A process that is killed when this is dropped.
struct Guard(Child);

impl Guard {
    fn start(scratch: &Scratch, fault: &str) -> Guard {
        let state = scratch.join("state");
        let socket = state.join("guard.sock");
        let child = slackwater()
            .args(["guard", "--socket", socket.to_str().unwrap()])
            .args(["--state-dir", state.to_str().unwrap()])
            .env("SLACKWATER_FAULT", fault)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Guard(child)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

/// A node with a volume in use, on a real disk.
struct Cell {
    server: Server,
    credentials: Arc<Credentials>,
    volume: String,
    staging: PathBuf,
    _disk: Disk,
    scratch: Scratch,
}

impl Cell {
    async fn new() -> Cell {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", "xfs", 4 * GIB);
        let ours = authority();
        let certificates = Certificates::new(&scratch, &issue(&ours, &node()));
        // In a PID namespace of its own, from which no guard is visible.
        let server = Server::spawn_wrapped(
            &scratch,
            &["unshare", "--pid", "--fork", "--kill-child"],
            &[&definition(&disk.mount_point)],
            &words(&flags(&certificates)),
            &[],
        );
        server.wait_ready();
        let credentials = credentials(controller(), issue(&ours, &controller()));
        let router = client(&credentials, address(&server));
        let volume = router.create("v1", GIB, mount("ext4"), &[]).await.unwrap();
        let staging = scratch.dir("kubelet").join("v1");
        std::fs::create_dir_all(&staging).unwrap();
        let kubelet = server.client();
        kubelet
            .stage(&volume, &staging, mount("ext4"))
            .await
            .unwrap();
        Cell {
            server,
            credentials,
            volume,
            staging,
            _disk: disk,
            scratch,
        }
    }

    fn router(&self) -> Client {
        client(&self.credentials, address(&self.server))
    }

    /// Whether the agent reports that it has a guard.
    async fn has_guard(&self) -> bool {
        let connector = slackwater::tls::Connector::new(
            self.credentials.clone(),
            node(),
            address(&self.server),
        );
        let endpoint = tonic::transport::Endpoint::from_static("http://agent");
        let mut agent = AgentClient::new(endpoint.connect_with_connector_lazy(connector));
        let description = agent.describe(DescribeRequest {}).await.unwrap();
        description.into_inner().guard_alive
    }

    async fn await_guard(&self) {
        self.await_guard_report(true).await;
    }

    /// On a slow machine, it reports the earlier state for a while.
    async fn await_guard_report(&self, there_is: bool) {
        let start = std::time::Instant::now();
        while self.has_guard().await != there_is {
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "a guard is reported: {there_is}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    async fn end(self) {
        let kubelet = self.server.client();
        kubelet.unstage(&self.volume, &self.staging).await.unwrap();
    }
}

/// Writes continuously, and is blocked while the file system is frozen.
struct Writer {
    end: Arc<AtomicBool>,
    written: Arc<std::sync::atomic::AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(folder: &Path) -> Writer {
        let (end, written) = (Arc::<AtomicBool>::default(), Arc::default());
        let path = folder.join("written");
        let (until, count) = (
            end.clone(),
            Arc::<std::sync::atomic::AtomicU64>::clone(&written),
        );
        let thread = std::thread::spawn(move || {
            let mut file = File::create(path).unwrap();
            while !until.load(Ordering::SeqCst) {
                file.write_all(&[1; 512]).unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        });
        Writer {
            end,
            written,
            thread: Some(thread),
        }
    }

    fn assert_goes_on(&self) {
        let before = self.written.load(Ordering::SeqCst);
        // More than the one write that was in progress.
        eventually("a writer that continues", || {
            self.written.load(Ordering::SeqCst) > before + 1
        });
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const SHORT: [(&str, &str); 2] = [("freezeTimeout", "1s"), ("retries", "0")];

#[tokio::test(flavor = "multi_thread")]
async fn root_without_its_guard_only_idle_volumes_are_cut() {
    let cell = Cell::new().await;
    assert!(!cell.has_guard().await);
    let router = cell.router();
    let message = refused(
        router.snapshot("s1", &cell.volume, &[]).await,
        Code::Unavailable,
    );
    assert!(
        message.contains("freeze guard does not answer"),
        "{message}"
    );
    let crash = [("consistency", "crash")];
    let snapshot = router.snapshot("s2", &cell.volume, &crash).await.unwrap();
    router.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    assert!(
        !cell.scratch.join("state/guard.sock").exists(),
        "no guard was started"
    );

    let guard = Guard::start(&cell.scratch, "");
    cell.await_guard().await;
    let snapshot = router.snapshot("s1", &cell.volume, &[]).await.unwrap();
    assert!(snapshot.ready_to_use);
    router.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    drop(guard);
    cell.await_guard_report(false).await;
    cell.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn root_a_guard_in_another_pid_namespace_that_dies_or_stops_in_the_window_leaves_nothing_frozen()
 {
    let cell = Cell::new().await;
    let router = cell.router();
    for fault in [
        "guard.freeze:kill-after",
        "guard.freeze:stop-after",
        "guard.thaw:kill",
        "guard.thaw:stop",
    ] {
        let guard = Guard::start(&cell.scratch, fault);
        cell.await_guard().await;
        let writer = Writer::start(&cell.staging);
        let lost = router
            .snapshot(fault, &cell.volume, &SHORT)
            .await
            .unwrap_err();
        assert_ne!(lost.code(), Code::DeadlineExceeded, "{lost:?}");
        writer.assert_goes_on();
        assert!(router.snapshots("").await.unwrap().is_empty(), "{fault}");
        // The supervisor restarts it, and the call is repeated after its pause with another name.
        drop(guard);
        let guard = Guard::start(&cell.scratch, "");
        cell.await_guard().await;
        let name = format!("{fault} again");
        let snapshot = router.snapshot(&name, &cell.volume, &[]).await.unwrap();
        router.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
        drop(guard);
    }
    cell.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn root_a_driver_that_is_killed_at_any_moment_of_a_cut_leaves_nothing_frozen() {
    let mut cell = Cell::new().await;
    let _guard = Guard::start(&cell.scratch, "");
    cell.await_guard().await;
    for round in 0..8 {
        let router = cell.router();
        let volume = cell.volume.clone();
        let cutting = tokio::spawn(async move {
            // One after the other, until the driver has ended.
            for number in 0..1000 {
                let name = format!("{round}-{number}");
                if router.snapshot(&name, &volume, &[]).await.is_err() {
                    return;
                }
            }
        });
        let writer = Writer::start(&cell.staging);
        tokio::time::sleep(std::time::Duration::from_millis(150 + 37 * round)).await;
        cell.server.kill();
        writer.assert_goes_on();
        cutting.await.unwrap();
        drop(writer);
        cell.server.restart();
        let freezes = cell.scratch.join("state/freezes");
        eventually("an empty journal", || names(&freezes).is_empty());
    }
    cell.await_guard().await;
    let router = cell.router();
    let last = router.snapshot("last", &cell.volume, &[]).await.unwrap();
    assert!(last.ready_to_use);
    for id in router.snapshots("").await.unwrap() {
        router.delete_snapshot(&id).await.unwrap();
    }
    cell.end().await;
}
