//! SQLite: two databases on two volumes, and transactions that span both.
//!
//! With rollback journals, such a transaction is atomic (through a super-journal, whose path is
//! written into the journals, so copies must appear at the originals' paths). With WAL it is not,
//! by SQLite's own definition: the main database commits first, so at any moment the other one is
//! equal or one transaction behind.

use std::path::Path;
use std::process::Command;

use super::process::{Client, Writer, program};
use super::volumes::{Volume, cut};
use super::{Node, rounds};

const MODES: [&str; 2] = ["wal", "delete"];

/// A shell on the two databases of a mode, unless SQLite refuses them. It ends at an error.
fn shell(mode: &str, main: &Path, other: &Path) -> Option<Client> {
    let mut command = Command::new(program(&["/usr/bin/sqlite3"]));
    command
        .arg("-batch")
        .arg("-bail")
        .arg("-init")
        .arg("/dev/null");
    command.arg(main.join(format!("{mode}.db")));
    let mut client = Client::start(command);
    let other = other.join(format!("{mode}.db"));
    let attach = format!("ATTACH '{}' AS other; SELECT 'attached';", other.display());
    let attached = client.ask(&attach)?;
    (attached == "attached").then_some(client)
}

/// Creates the databases of a mode, and writes to them.
fn writer(mode: &'static str, main: &Path, other: &Path) -> Writer {
    let mut client = shell(mode, main, other).unwrap();
    for database in ["main", "other"] {
        let set = format!("PRAGMA {database}.journal_mode={mode};");
        assert_eq!(client.ask(&set).as_deref(), Some(mode));
        // WAL writes are never synced; checkpoints are frequent.
        let synchronous = if mode == "wal" { "OFF" } else { "FULL" };
        let make = format!(
            "PRAGMA {database}.synchronous={synchronous}; \
             CREATE TABLE {database}.log (id INTEGER PRIMARY KEY, payload TEXT); SELECT 'made';"
        );
        assert_eq!(client.ask(&make).as_deref(), Some("made"));
    }
    assert_eq!(
        client.ask("PRAGMA wal_autocheckpoint=20;").as_deref(),
        Some("20")
    );
    Writer::start(client, |number| {
        let insert = |database| {
            format!("INSERT INTO {database}.log VALUES ({number}, printf('%.500c', 'x'));")
        };
        let (main, other) = (insert("main"), insert("other"));
        format!("BEGIN; {main} {other} COMMIT; SELECT {number};")
    })
}

/// Checks the databases of a mode, which must contain `acknowledged` transactions. Returns the
/// problem.
fn check(mode: &str, main: &Path, other: &Path, acknowledged: u64) -> Result<(), String> {
    let shell = shell(mode, main, other);
    let mut client = shell.ok_or_else(|| format!("{mode}: refused"))?;
    let mut counts = Vec::new();
    for database in ["main", "other"] {
        let mut ask = |line: String| client.ask(&line).unwrap_or_default();
        let sound = ask(format!("PRAGMA {database}.integrity_check;"));
        if sound != "ok" {
            return Err(format!("{mode}: {database}: {sound:?}"));
        }
        let count = ask(format!("SELECT count(*) FROM {database}.log;"));
        let last = ask(format!("SELECT coalesce(max(id), 0) FROM {database}.log;"));
        if count != last {
            return Err(format!("{mode}: {database} has {count:?} of {last:?}"));
        }
        counts.push(
            count
                .parse::<u64>()
                .map_err(|error| format!("{count:?}: {error}"))?,
        );
    }
    let (main, other) = (counts[0], counts[1]);
    let together = main == other || (mode == "wal" && main == other + 1);
    if together && other >= acknowledged {
        return Ok(());
    }
    Err(format!(
        "{mode}: {main} and {other}, {acknowledged} were acknowledged"
    ))
}

/// Repeatedly cuts both volumes under load, or, `in_sequence`, one after the other. Returns the
/// problems of all cuts.
async fn problems(node: &Node, cuts: usize, in_sequence: bool) -> Vec<String> {
    let main = Volume::new(node, "main", "ext4").await;
    let other = Volume::new(node, "other", "xfs").await;
    let writers = MODES.map(|mode| writer(mode, &main.staging, &other.staging));
    let mut created = Vec::new();
    for number in 0..cuts {
        writers
            .iter()
            .for_each(|writer| writer.goes_beyond(writer.acknowledged() + 3));
        let acknowledged = [0, 1].map(|mode: usize| writers[mode].acknowledged());
        let name = format!("cut-{number}");
        let (group, members) = cut(node, &name, &[&main, &other], in_sequence).await;
        created.push((group, members, acknowledged));
    }
    for writer in writers {
        writer.stop();
    }
    // The copies are mounted at the originals' paths, because SQLite writes down paths.
    main.unstage(node).await;
    other.unstage(node).await;
    let mut found = Vec::new();
    for (group, members, acknowledged) in created {
        let one = main.copy(node, &members[0], &main.staging).await;
        let two = other.copy(node, &members[1], &other.staging).await;
        for (mode, acknowledged) in MODES.iter().zip(acknowledged) {
            found.extend(check(mode, &one.staging, &two.staging, acknowledged).err());
        }
        one.end(node).await;
        two.end(node).await;
        node.client.delete_all_of(&group).await;
    }
    node.client.delete(&main.id).await.unwrap();
    node.client.delete(&other.id).await.unwrap();
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_across_two_volumes_recovers_from_every_cut() {
    let node = Node::new();
    // Copies are checked after the writers have ended, because a pool has no space for all copies
    // of a soak test.
    for _ in 0..rounds(1, 20) {
        let found = problems(&node, rounds(10, 50), false).await;
        assert!(found.is_empty(), "{found:#?}");
    }
    node.assert_nothing_left();
}

/// The same, one volume after the other: proof that the oracle detects a violation.
#[tokio::test(flavor = "multi_thread")]
async fn cut_in_sequence_sqlite_disagrees_across_volumes() {
    let node = Node::new();
    let found = problems(&node, 10, true).await;
    assert!(!found.is_empty(), "10 cuts in sequence, and all are good");
    println!("{found:#?}");
    node.assert_nothing_left();
}
