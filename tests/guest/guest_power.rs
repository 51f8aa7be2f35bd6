//! Power cuts of a guest during calls on a pool of LVM. What was answered is there afterwards, and
//! what was not is there whole or not at all.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slackwater_testkit::guest::{self, cut_power, rounds};
use slackwater_testkit::snapshots::members;
use slackwater_testkit::{Client, Scratch, Server, block, mount, run};

use crate::guest_lvm::{POOL, Volume, create_pool, created, end_pool, restore, runtime};
use crate::guest_pool::slackwater;

pub(crate) const STATE: &str = "/mnt/state";
/// A disk whose log gets a mark after each line of the ledger, if there is one.
pub(crate) const LOGGED: &str = "/dev/mapper/pv-logged";
pub(crate) const DISKS: [&str; 2] = ["pool:1G", "state:64M"];

/// What was asked and what was answered, on a disk of its own.
pub(crate) struct Ledger(PathBuf);

impl Ledger {
    pub(crate) fn new(name: &str) -> Ledger {
        Ledger(Path::new(STATE).join(name))
    }

    /// A copy of the first lines.
    pub(crate) fn first(&self, lines: usize, name: &str) -> Ledger {
        let text = fs::read_to_string(&self.0).unwrap();
        let first = Ledger::new(name);
        let kept = text.split_inclusive('\n').take(lines);
        fs::write(&first.0, kept.collect::<String>()).unwrap();
        first
    }

    fn note(&self, words: &[&str]) {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.0)
            .unwrap();
        writeln!(file, "{}", words.join(" ")).unwrap();
        file.sync_all().unwrap();
        if Path::new(LOGGED).exists() {
            run("dmsetup", &["message", LOGGED, "0", "mark", words[0]]);
        }
    }

    /// The lines that begin with this word, by their second word.
    fn all(&self, kind: &str) -> BTreeMap<String, String> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        let lines = text.lines().filter_map(|line| {
            let (found, rest) = line.split_once(' ')?;
            let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
            (found == kind).then(|| (name.to_string(), value.to_string()))
        });
        lines.collect()
    }
}

/// Mounts the kept disk of the state. Returns whether it is new.
pub(crate) fn prepare() -> bool {
    let disk = guest::disk("state");
    let is_new = !slackwater_testkit::succeeds("blkid", &["-p", &disk]);
    if is_new {
        run("mkfs.ext4", &["-q", &disk]);
    }
    fs::create_dir_all(STATE).unwrap();
    run("mount", &[&disk, STATE]);
    is_new
}

/// A driver of the pool, with the kept node record.
pub(crate) fn serve() -> (Scratch, Server) {
    run("vgchange", &["--activate", "y", "slackwater-vg"]);
    let scratch = Scratch::new();
    let (kept, record) = (
        Path::new(STATE).join("node.json"),
        scratch.join("node.json"),
    );
    let is_new = !kept.exists();
    if !is_new {
        fs::copy(&kept, &record).unwrap();
    }
    let server = Server::start(&scratch, &[POOL]);
    if is_new {
        fs::copy(&record, &kept).unwrap();
        File::open(&kept).unwrap().sync_all().unwrap();
        File::open(STATE).unwrap().sync_all().unwrap();
    }
    (scratch, server)
}

/// A driver on the kept disks.
pub(crate) fn start() -> (Scratch, Server, Ledger) {
    if prepare() {
        create_pool("640M");
    }
    let (scratch, server) = serve();
    (scratch, server, Ledger::new("ledger"))
}

fn how(name: &str) -> slackwater::csi::VolumeCapability {
    match name.ends_with("raw") {
        true => block(),
        false => mount("ext4"),
    }
}

/// Writes a text that a later boot finds.
fn write(volume: &Volume, text: &str) {
    let mut bytes = [0; 4096];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    let path = content_of(volume);
    let mut options = OpenOptions::new();
    let mut file = options.create(true).write(true).open(path).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    if volume.target.is_dir() {
        File::open(&volume.target).unwrap().sync_all().unwrap();
    }
}

fn content_of(volume: &Volume) -> PathBuf {
    match volume.target.is_dir() {
        true => volume.target.join("content"),
        false => volume.target.clone(),
    }
}

fn read(volume: &Volume) -> String {
    use std::io::Read;
    let mut bytes = [0; 4096];
    let mut file = File::open(content_of(volume)).unwrap();
    file.read_exact(&mut bytes).unwrap();
    let text = bytes.split(|byte| *byte == 0).next().unwrap();
    String::from_utf8_lossy(text).into_owned()
}

/// Creates, cuts and deletes until the power is cut.
pub(crate) async fn load(scratch: &Scratch, client: &Client, ledger: &Ledger, rounds: usize) {
    let boot = ledger.all("boot").len();
    ledger.note(&["boot", &boot.to_string()]);
    guest::loaded();
    let mut last: Vec<(Volume, String)> = Vec::new();
    for round in 0..rounds {
        for kind in ["files", "raw"] {
            let name = format!("{boot}-{round}-{kind}");
            ledger.note(&["create", &name]);
            let volume = created(scratch, client, &name, how(&name)).await;
            ledger.note(&["created", &name, &volume.id]);
            volume.up(client).await;
            write(&volume, &name);
            ledger.note(&["written", &name]);
            last.push((volume, name));
        }
        let ids: Vec<String> = last.iter().map(|(volume, _)| volume.id.clone()).collect();
        let name = format!("{boot}-{round}");
        ledger.note(&["cut", &name, &ids.join(" ")]);
        let group = client.group(&name, &ids, &[]).await.unwrap();
        let made: Vec<String> = members(&group);
        let texts = last.iter().map(|(_, text)| text.as_str());
        let texts: Vec<&str> = texts.collect();
        ledger.note(&["group", &name, &made.join(" "), &texts.join(" ")]);
        for (volume, name) in last.drain(..) {
            volume.down(client).await;
            ledger.note(&["delete", &name]);
            client.delete(&volume.id).await.unwrap();
            ledger.note(&["deleted", &name]);
        }
        if round % 2 == 1 {
            ledger.note(&["drop", &name]);
            client.delete_all_of(&group).await;
        }
    }
}

pub(crate) async fn check(scratch: &Scratch, client: &Client, ledger: &Ledger) {
    let listed: BTreeSet<String> = client.list().await.unwrap().into_iter().collect();
    let [create, created, written, delete, deleted, dropped] =
        ["create", "created", "written", "delete", "deleted", "drop"].map(|kind| ledger.all(kind));
    for (name, id) in &created {
        if deleted.contains_key(name) {
            assert!(!listed.contains(id), "{name} was deleted");
        } else if !delete.contains_key(name) {
            assert!(listed.contains(id), "{name} was created");
        }
    }
    // A repeat of what was not answered finishes it.
    for name in create.keys().filter(|name| !deleted.contains_key(*name)) {
        let volume = self::created(scratch, client, name, how(name)).await;
        let was = created.get(name);
        assert!(was.is_none_or(|id| *id == volume.id), "{name}");
        volume.up(client).await;
        if written.contains_key(name) && !delete.contains_key(name) {
            assert_eq!(read(&volume), *name);
        }
        volume.down(client).await;
        client.delete(&volume.id).await.unwrap();
        ledger.note(&["deleted", name]);
    }
    for (name, parts) in &ledger.all("group") {
        if dropped.contains_key(name) {
            continue;
        }
        let parts: Vec<&str> = parts.split(' ').collect();
        let (snapshots, texts) = parts.split_at(parts.len() / 2);
        for (snapshot, text) in snapshots.iter().zip(texts) {
            let copy = restore(scratch, client, snapshot, how(text)).await;
            copy.up(client).await;
            assert_eq!(read(&copy), *text, "in the cut {name}");
            copy.down(client).await;
            client.delete(&copy.id).await.unwrap();
        }
    }
    let reported = slackwater(&["volumes"], scratch);
    assert!(
        !reported.contains("thin device"),
        "nothing is lost or left: {reported}"
    );
}

#[test]
fn what_was_answered_before_a_power_cut_is_there_and_the_rest_is_whole_or_absent() {
    let test = "guest_power::what_was_answered_before_a_power_cut_is_there_and_the_rest_is_whole_or_absent";
    let times =
        (0..rounds(1, 60)).map(|cut| Duration::from_millis(1500 + (cut as u64 * 1370) % 4000));
    let times: Vec<Duration> = times.collect();
    let load = || {
        let (scratch, server, ledger) = start();
        runtime()
            .block_on(async { self::load(&scratch, &server.client(), &ledger, usize::MAX).await });
    };
    let check = || {
        let (scratch, server, ledger) = start();
        runtime().block_on(async { self::check(&scratch, &server.client(), &ledger).await });
        end_pool(server);
    };
    cut_power(test, &DISKS, &times, load, check);
}
