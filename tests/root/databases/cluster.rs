//! PostgreSQL with its write-ahead log on one volume and everything else on another.

use std::path::PathBuf;

use super::Node;
use super::engine::{Engine, Run};
use super::process::{Writer, open_to_nobody};
use super::volumes::{Volume, cut};

const WRITERS: u64 = 2;

/// A cluster on two volumes, or on copies of them.
struct Cluster<'a> {
    wal: &'a Volume,
    data: &'a Volume,
    run: PathBuf,
}

impl Cluster<'_> {
    fn data(&self) -> PathBuf {
        self.data.folder.join("pg")
    }

    fn make(&self) {
        // Small log segments, so that one is always being recycled.
        let wal = format!("--waldir={}", self.wal.folder.join("pg_wal").display());
        Engine::PostgreSql.make(&self.data(), &[&wal, "--wal-segsize=1", "--data-checksums"]);
    }

    /// Removes what would refer to the original's path and process.
    fn adopt(&self) {
        let link = self.data().join("pg_wal");
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(self.wal.folder.join("pg_wal"), link).unwrap();
        let _ = std::fs::remove_file(self.data().join("postmaster.pid"));
    }

    fn start(&self) -> Result<Run, String> {
        let more = ["-c", "max_wal_size=4MB", "-c", "min_wal_size=2MB"];
        Engine::PostgreSql.start(&self.data(), &self.run, &more)
    }
}

/// Commits rows in two tables at once; a third connection makes checkpoints continuously.
fn writers(run: &Run) -> Vec<Writer> {
    let mut client = run.client();
    for writer in 0..WRITERS {
        let make = format!(
            "CREATE TABLE log{writer} (id bigint PRIMARY KEY, payload text); \
             CREATE TABLE total{writer} (n bigint); INSERT INTO total{writer} VALUES (0); SELECT 1;"
        );
        assert_eq!(client.ask(&make).as_deref(), Some("1"));
    }
    let mut all: Vec<_> = (0..WRITERS)
        .map(|writer| {
            Writer::start(run.client(), move |number| {
                format!(
                    "BEGIN; INSERT INTO log{writer} VALUES ({number}, {}); \
                     UPDATE total{writer} SET n = n + 1; COMMIT; SELECT {number};",
                    payload(&number.to_string())
                )
            })
        })
        .collect();
    all.push(Writer::start(client, |number| {
        format!("CHECKPOINT; SELECT {number};")
    }));
    all
}

/// About 1 kB that depends on an ID.
fn payload(id: &str) -> String {
    format!("repeat(md5(({id})::text), 30)")
}

/// Starts the restored cluster. Returns what is wrong with it.
fn recover(cluster: &Cluster<'_>, acknowledged: &[u64]) -> Result<(), String> {
    cluster.adopt();
    let run = cluster.start()?;
    let mut client = run.client();
    let mut ask = |line: String| {
        let answer = client.ask(&line).unwrap_or_default();
        if answer == "t" {
            Ok(())
        } else {
            Err(format!("{line} is {answer:?}\n{}", run.log()))
        }
    };
    for (writer, acknowledged) in (0..WRITERS).zip(acknowledged) {
        let log = format!("FROM log{writer}");
        // Checks the checksums of all pages, and all rows in the order of their IDs, also through
        // the index.
        ask(format!("SELECT count(*) >= {acknowledged} {log};"))?;
        ask(format!("SELECT count(*) = coalesce(max(id), 0) {log};"))?;
        ask(format!(
            "SELECT coalesce(bool_and(payload = {}), true) {log};",
            payload("id")
        ))?;
        ask(format!(
            "SELECT (SELECT n FROM total{writer}) = (SELECT count(*) {log});"
        ))?;
    }
    ask("CREATE EXTENSION IF NOT EXISTS amcheck; \
         SELECT bool_and(bt_index_check(c.oid, i.indisunique)::text = '') \
         FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid \
         JOIN pg_am a ON a.oid = c.relam AND a.amname = 'btree' WHERE c.relpersistence = 'p';"
        .into())
}

/// Cuts both volumes under load, or, `in_sequence`, the log before the data, until a copy is wrong.
/// Returns the problem. `pools` are those of the log and of the data.
pub async fn first_problem(
    node: &Node,
    pools: [&str; 2],
    cuts: usize,
    in_sequence: bool,
) -> Option<String> {
    open_to_nobody(&node.scratch);
    let wal = Volume::in_pool(node, pools[0], "wal", "xfs").await;
    let data = Volume::in_pool(node, pools[1], "data", "ext4").await;
    let cluster = Cluster {
        wal: &wal,
        data: &data,
        run: node.scratch.join("run"),
    };
    cluster.make();
    let server = cluster.start().unwrap();
    let writers = writers(&server);
    let mut found = None;
    for number in 0..cuts {
        writers
            .iter()
            .for_each(|writer| writer.goes_beyond(writer.acknowledged()));
        let acknowledged: Vec<_> = writers.iter().map(Writer::acknowledged).collect();
        let name = format!("cut-{number}");
        let (group, members) = cut(node, &name, &[&wal, &data], in_sequence).await;
        let wal_copy = wal.copy(node, &members[0], &node.staging("wal-copy")).await;
        let data_copy = data
            .copy(node, &members[1], &node.staging("data-copy"))
            .await;
        let copy = Cluster {
            wal: &wal_copy,
            data: &data_copy,
            run: node.scratch.join("run-copy"),
        };
        found = recover(&copy, &acknowledged).err();
        wal_copy.end(node).await;
        data_copy.end(node).await;
        node.client.delete_all_of(&group).await;
        if found.is_some() {
            break;
        }
    }
    for writer in writers {
        writer.stop();
    }
    drop(server);
    wal.end(node).await;
    data.end(node).await;
    found
}
