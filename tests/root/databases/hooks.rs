//! Level application: the real databases, held by their sessions while the real driver cuts.

use std::path::{Path, PathBuf};

use slackwater::csi::Snapshot;
use tonic::Status;

use super::engine::{Engine, Run};
use super::process::{Writer, folder, install, open_to_nobody};
use super::sessions::session;
use super::volumes::Volume;
use super::{Node, definition};
use slackwater_testkit::{Server, eventually};

/// Runs a session, and forwards its READY only when the test allows it; the test inspects the
/// database before that.
const GATE: &str = r#"#!/bin/sh
gate=$1
shift
"$@" | while read -r line; do
    : >"$gate/held"
    while [ ! -e "$gate/go" ] && [ -d "$gate" ]; do sleep 0.02; done
    echo "$line"
done
"#;

/// A database on a volume, with a writer and a session.
struct Held {
    node: Node,
    engine: Engine,
    volume: Volume,
    writer: Writer,
    server: Run,
    gate: PathBuf,
}

fn data(volume: &Volume) -> PathBuf {
    volume.folder.join("data")
}

impl Held {
    async fn new(engine: Engine) -> Held {
        let mut node = Node::new();
        open_to_nobody(&node.scratch);
        let volume = Volume::new(&node, "data", "ext4").await;
        engine.make(&data(&volume), &[]);
        let server = engine.start(&data(&volume), &node.scratch.join("run"), &[]);
        let server = server.unwrap();
        let writer = server.writer();
        let gate = folder(&node.scratch.join("gate"));
        let (through, program) = (node.scratch.join("through"), node.scratch.join("session"));
        install(&through, GATE);
        install(&program, &std::fs::read_to_string(session(engine)).unwrap());
        let text = |path: &Path| path.to_str().unwrap().to_string();
        let mut command = vec![
            text(&through),
            text(&gate),
            text(&program),
            "{seconds}".into(),
        ];
        let words = server.words().into_iter();
        command.extend(words.map(|word| word.into_string().unwrap()));
        let config = node.scratch.join("config.toml");
        let hook = format!(
            "[[hook]]\nname = \"the-database\"\npvc = \"db/da*\"\nuser = \"nobody\"\n\
             timeout = \"120s\"\ncommand = {command:?}\n"
        );
        std::fs::write(&config, hook).unwrap();
        node.server.kill();
        let pool = definition(&node.disk.mount_point);
        let more = ["--config", config.to_str().unwrap()];
        node.server = Server::spawn(&node.scratch, &[&pool], &more, &[]);
        node.server.wait_ready();
        writer.goes_beyond(100);
        Held {
            node,
            engine,
            volume,
            writer,
            server,
            gate,
        }
    }

    /// Takes a snapshot in parallel to the test.
    fn snapshot(&self, name: &str) -> tokio::task::JoinHandle<Result<Snapshot, Status>> {
        let (client, name, id) = (
            self.node.client.clone(),
            name.to_string(),
            self.volume.id.clone(),
        );
        let application = [
            ("consistency", "application"),
            ("quiesceTimeout", "120s"),
            ("freezeTimeout", "30s"),
        ];
        tokio::spawn(async move { client.snapshot(&name, &id, &application).await })
    }

    /// Waits until the database is held, and checks it. Returns the minimum and the maximum number
    /// of rows that there can be now.
    fn assert_held(&self) -> (u64, u64) {
        eventually("the session is ready", || self.gate.join("held").exists());
        let before = self.writer.acknowledged();
        std::thread::sleep(std::time::Duration::from_millis(500));
        let after = self.writer.acknowledged();
        assert!(
            after <= before + 1,
            "held at {before}, yet {after} are acknowledged"
        );
        (after, before + 1)
    }

    fn let_go(&self) {
        std::fs::write(self.gate.join("go"), "").unwrap();
    }

    /// The level in the output of `slackwater volumes --json`.
    fn level(&self, snapshot: &str) -> String {
        let all = self.node.cli_snapshots();
        let found = all.iter().find(|one| one["id"] == snapshot);
        found.unwrap()["level"].as_str().unwrap().to_string()
    }

    /// Starts the database on a copy. Returns its number of rows, and its log.
    async fn recovered(&self, snapshot: &str) -> (u64, String) {
        let staging = self.node.staging("copy");
        let copy = self.volume.copy(&self.node, snapshot, &staging).await;
        // It belongs to the original, which is still running.
        let _ = std::fs::remove_file(data(&copy).join("postmaster.pid"));
        let server = self
            .engine
            .start(&data(&copy), &self.node.scratch.join("run-copy"), &[]);
        let server = server.unwrap_or_else(|message| panic!("the copy is refused: {message}"));
        let count = server.count();
        let log = server.log();
        drop(server);
        copy.end(&self.node).await;
        self.node.client.delete_snapshot(snapshot).await.unwrap();
        (count, log)
    }

    async fn end(self) {
        let acknowledged = self.writer.stop();
        assert_eq!(self.server.count(), acknowledged);
        drop(self.server);
        self.volume.end(&self.node).await;
        self.node.assert_nothing_left();
    }
}

/// The amount of log that PostgreSQL replayed at its start, according to its log.
fn replayed_bytes(log: &str) -> Option<u64> {
    if log.contains("redo is not required") {
        return Some(0);
    }
    let position = |before: &str| {
        let word = log.split_once(before)?.1.split_whitespace().next()?;
        let (high, low) = word.split_once('/')?;
        let parse = |text| u64::from_str_radix(text, 16).ok();
        Some((parse(high)? << 32) + parse(low)?)
    };
    Some(position("redo done at ")? - position("redo starts at ")?)
}

/// Cut while the database is held: the copy has all acknowledged rows, and none that was not begun.
async fn held_through_the_cut(held: &Held) {
    let snapshot = held.snapshot("held");
    let (fewest, most) = held.assert_held();
    held.let_go();
    let snapshot = snapshot.await.unwrap().unwrap();
    held.writer.goes_beyond(most);
    assert_eq!(held.level(&snapshot.snapshot_id), "application");
    let (count, log) = held.recovered(&snapshot.snapshot_id).await;
    assert!(
        (fewest..=most).contains(&count),
        "{count} of {fewest} to {most}"
    );
    if let Engine::PostgreSql = held.engine {
        let replayed = replayed_bytes(&log).unwrap_or_else(|| panic!("{log}"));
        assert!(replayed < 4096, "no more than the checkpoint itself: {log}");
    }
}

/// The driver dies while the database is held: the database continues, and the next driver works.
async fn released_when_the_driver_dies(held: &mut Held) {
    for name in ["held", "go"] {
        std::fs::remove_file(held.gate.join(name)).unwrap();
    }
    let snapshot = held.snapshot("killed");
    let (_, most) = held.assert_held();
    held.node.server.kill();
    snapshot.await.unwrap().unwrap_err();
    held.writer.goes_beyond(most + 10);
    held.let_go();
    held.node.server.restart();
    let snapshot = held.snapshot("killed").await.unwrap().unwrap();
    assert_eq!(held.level(&snapshot.snapshot_id), "application");
    let (count, _) = held.recovered(&snapshot.snapshot_id).await;
    assert!(count > most, "the repeat makes a new cut");
}

/// A cut without the knowledge of the database, as after a power failure: nothing acknowledged is
/// lost.
async fn not_held(held: &Held) {
    held.writer.goes_beyond(held.writer.acknowledged() + 10);
    let acknowledged = held.writer.acknowledged();
    let snapshot = held
        .node
        .client
        .snapshot("not-held", &held.volume.id, &[])
        .await;
    let snapshot = snapshot.unwrap().snapshot_id;
    assert_eq!(held.level(&snapshot), "filesystem");
    let (count, _) = held.recovered(&snapshot).await;
    assert!(count >= acknowledged, "{count} of {acknowledged}");
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_is_held_through_the_cut_and_always_released() {
    let mut held = Held::new(Engine::PostgreSql).await;
    held_through_the_cut(&held).await;
    released_when_the_driver_dies(&mut held).await;
    held.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mariadb_is_held_through_the_cut_and_always_released() {
    let mut held = Held::new(Engine::MariaDb).await;
    not_held(&held).await;
    held_through_the_cut(&held).await;
    released_when_the_driver_dies(&mut held).await;
    held.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_is_held_through_the_cut_and_always_released() {
    let mut held = Held::new(Engine::Redis { append_only: true }).await;
    not_held(&held).await;
    held_through_the_cut(&held).await;
    released_when_the_driver_dies(&mut held).await;
    held.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_without_an_append_only_file_is_written_out_for_the_cut() {
    let held = Held::new(Engine::Redis { append_only: false }).await;
    held_through_the_cut(&held).await;
    held.end().await;
}
