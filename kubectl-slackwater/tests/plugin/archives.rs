//! `export` and `import`, and commands of pools, as a process, with a small API server that runs programs
//! in pods.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::exec_server::{End, Execs, Run, Script, pod};
use crate::fixture::{id, said};

fn run(pod: &str, container: &str, words: &[&str]) -> Run {
    Run {
        pod: pod.into(),
        container: container.into(),
        words: words.iter().map(ToString::to_string).collect(),
        input: None,
    }
}

/// Bytes that are no text, in several messages.
fn archive() -> Vec<u8> {
    (0..100_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let each = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = each
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::Builder::new()
        .prefix("slackwater-plugin-")
        .tempdir();
    folder.unwrap()
}

const EXPORT: [&str; 3] = ["slackwater", "export", "--endpoint=unix:///plugin/csi.sock"];

#[test]
fn an_archive_goes_to_stdout_or_to_a_file_that_is_complete() {
    let cluster = Execs::start();
    let fine = Script {
        out: archive(),
        err: "",
        end: End::Code(0),
    };
    cluster.script("driver-1", fine);
    let done = cluster.output(&["export", "monday"]);
    assert!(
        done.status.success() && done.stdout == archive(),
        "{}",
        done.status
    );
    let snapshot = id(0, 101);
    let words = [&EXPORT[..], &[&snapshot]].concat();
    assert_eq!(cluster.runs(), [run("driver-1", "driver", &words)]);
    let folder = folder();
    let file = folder.path().join("monday.slackwater");
    std::fs::write(&file, "an earlier one").unwrap();
    let (member, base) = (id(0, 102), id(0, 100));
    let path = file.to_str().unwrap();
    let done = cluster.output(&[
        "export", "monday", &member, "--base", &base, "--output", path,
    ]);
    assert!(done.status.success() && done.stdout.is_empty(), "{done:?}");
    assert_eq!(std::fs::read(&file).unwrap(), archive());
    assert_eq!(names(folder.path()), ["monday.slackwater"]);
    let base = format!("--base={base}");
    let words = [&EXPORT[..], &[&base, &snapshot, &member]].concat();
    assert_eq!(cluster.runs(), [run("driver-1", "driver", &words)]);
}

#[test]
fn an_archive_that_ends_early_is_no_file_and_no_success() {
    let cluster = Execs::start();
    let folder = folder();
    let path = folder.path().join("monday.slackwater");
    let path = path.to_str().unwrap();
    let failures = [
        (End::Broken, 1),
        (End::Closed, 1),
        (End::Refused("it is gone"), 1),
        (End::Code(64), 64),
    ];
    for (end, code) in failures {
        let script = Script {
            out: archive(),
            err: "the driver says why\n",
            end,
        };
        cluster.script("driver-1", script.clone());
        for target in [&["--output", path][..], &[]] {
            let done = cluster.output(&[&["export", "monday"], target].concat());
            assert_eq!(done.status.code(), Some(code), "{script:?}");
            assert!(
                done.stderr.starts_with(b"the driver says why\n"),
                "{done:?}"
            );
            assert_eq!(names(folder.path()), [""; 0], "{:?}", script.end);
        }
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_export_and_leaves_no_file() {
    let cluster = Execs::start();
    let script = Script {
        out: archive(),
        err: "begun\n",
        end: End::Never,
    };
    cluster.script("driver-1", script);
    let folder = folder();
    let path = folder.path().join("monday.slackwater");
    let words = ["export", "monday", "--output", path.to_str().unwrap()];
    let mut command = cluster.command(&words);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut errors, &mut line).unwrap();
    assert_eq!(line, "begun\n");
    assert_eq!(names(folder.path()).len(), 1);
    let number = child.id().to_string();
    let kill = std::process::Command::new("kill")
        .args(["-INT", &number])
        .status();
    assert!(kill.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn an_export_that_cannot_be_written_or_found_is_refused() {
    let cluster = Execs::start();
    let (here, there) = (id(0, 101), id(1, 101));
    let mut all = Vec::new();
    for words in [
        &["export", "monday", "--output", "/dev/null"][..],
        &["export", "monday", "--output", "/absent/file"],
        &["export", "none"],
        &["export", "pending"],
        &["export", "foreign"],
        &["export", &here, &there],
        &["import", "node-1"],
        &["pool", "follow", "--", "--cluster"],
        &["pool", "follow", "node-1/moved"],
    ] {
        let mut command = cluster.command(words);
        let done = command.stdin(Stdio::null()).output().unwrap();
        all.push(said(words, &done));
    }
    assert_eq!(cluster.runs(), []);
    insta::assert_snapshot!("archives_refused", all.join("\n"));
}

#[test]
fn an_import_gets_the_whole_archive_and_its_end() {
    let cluster = Execs::start();
    let folder = folder();
    let file = folder.path().join("archive");
    std::fs::write(&file, archive()).unwrap();
    let path = file.to_str().unwrap();
    let options = [
        "--name",
        "shop",
        "--to-pool",
        "default",
        "--size",
        "20Gi",
        "--more",
    ];
    let words = [&["import", "node-1", "--file", path, "--yes"], &options[..]].concat();
    let done = cluster.output(&words);
    assert!(done.status.success(), "{done:?}");
    assert!(
        done.stdout.ends_with(b"all is well on node-1\n"),
        "{done:?}"
    );
    let words = [
        "slackwater",
        "import",
        "--endpoint=unix:///plugin/csi.sock",
        "--name=shop",
        "--to-pool=default",
        "--size=20Gi",
        "--more",
    ];
    let expected = Run {
        input: Some(archive()),
        ..run("driver-1", "driver", &words)
    };
    assert_eq!(cluster.runs(), [expected]);
    // Of stdin.
    let words = ["import", "node-2", "--yes"];
    let mut command = cluster.command(&words);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"archive").unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(cluster.runs()[0].input.as_deref(), Some(&b"archive"[..]));
    // Without --yes, and of a directory, which cannot be read: its end is not that of stdin.
    let mut all = vec![cluster.says(&["import", "node-1", "--file", path])];
    assert_eq!(cluster.runs(), []);
    let unreadable = folder.path().to_str().unwrap();
    all.push(cluster.says(&["import", "node-1", "--yes", "--file", unreadable]));
    assert!(cluster.runs().iter().all(|run| run.input.is_none()));
    cluster.state.lock().unwrap().is_old = true;
    all.push(cluster.says(&["import", "node-1", "--yes", "--file", path]));
    assert!(cluster.runs().iter().all(|run| run.input.is_none()));
    let all = all.join("\n").replace(unreadable, "FOLDER");
    insta::assert_snapshot!("import", all);
}

/// A pod of the controller.
fn add_router(cluster: &Execs) {
    let mut router = pod("router-1", "node-1");
    router["spec"]["containers"][0]["name"] = "router".into();
    router["status"]["containerStatuses"][0]["name"] = "router".into();
    cluster.state.lock().unwrap().pods.push(router);
}

#[test]
fn volumes_of_a_pool_follow_it_by_a_command_of_the_controller() {
    let cluster = Execs::start();
    let mut all = Vec::new();
    add_router(&cluster);
    let plan = Script::of("pvc-1 would be moved\n", "", End::Code(0));
    cluster.script("router-1", plan);
    let words = [
        "slackwater",
        "pool",
        "adopt",
        "--cluster",
        "--endpoint=unix:///plugin/csi.sock",
    ];
    for more in [&[][..], &["--dry-run"], &["--yes"]] {
        all.push(cluster.says(&[&["pool", "follow", "node-2/moved"], more].concat()));
        let yes = more.iter().filter(|word| **word == "--yes").copied();
        let pool = ["node-2/moved"].into_iter();
        let words: Vec<_> = words.into_iter().chain(pool).chain(yes).collect();
        assert_eq!(cluster.runs(), [run("router-1", "router", &words)]);
    }
    insta::assert_snapshot!("pool_follow", all.join("\n"));
}

#[test]
fn orphans_of_this_moment_are_those_of_the_controller() {
    let cluster = Execs::start();
    add_router(&cluster);
    cluster.script("router-1", Script::of("what it prints\n", "", End::Code(0)));
    let endpoint = "--endpoint=unix:///plugin/csi.sock";
    let (one, other) = (id(0, 1), id(0, 2));
    let delete = ["slackwater", "snapshots", "delete", endpoint, &one, &other];
    let list = ["slackwater", "volumes", "--orphans", endpoint, "--json"];
    let cases = [
        (&["-o", "json"][..], &list[..], &[][..], 0),
        (&["--delete", &one, &other], &delete, &[], 4),
        (&["--dry-run", "--delete", &one, &other], &delete, &[], 0),
        (&["--yes", "--delete", &one, &other], &delete, &["--yes"], 0),
    ];
    for (given, words, yes, code) in cases {
        let done = cluster.output(&[&["orphans", "--now"], given].concat());
        assert_eq!(done.stdout, b"what it prints\n");
        assert_eq!(done.status.code(), Some(code), "{given:?}");
        let expected = run("router-1", "router", &[words, yes].concat());
        assert_eq!(cluster.runs(), [expected]);
    }
    for wrong in [["-o", "wide"], ["--keep", &one], ["--delete", "--config=x"]] {
        let done = cluster.output(&[&["orphans", "--now"], &wrong[..]].concat());
        assert_eq!(done.status.code(), Some(64), "{wrong:?}");
    }
    assert_eq!(cluster.runs(), []);
}

#[test]
fn a_volume_is_imported_on_a_node_and_what_the_driver_prints_is_all() {
    let cluster = Execs::start();
    cluster.script("driver-2", Script::of("{}\n", "examined\n", End::Code(0)));
    let given = [
        "import-volume",
        "node-2",
        "--from",
        "/dev/vg/a b",
        "--name",
        "n",
        "--to-pool",
        "p",
        "--size",
        "1Gi",
        "--fs-type",
        "ext4",
        "--scratch",
        "/s",
        "--claim",
        "shop/data",
        "--persistent-volume",
        "v",
        "--storage-class",
        "c",
        "--raw",
        "-o",
        "json",
    ];
    let words = [
        "slackwater",
        "volumes",
        "import",
        "--endpoint=unix:///plugin/csi.sock",
        "--from=/dev/vg/a b",
        "--name=n",
        "--to-pool=p",
        "--size=1Gi",
        "--fs-type=ext4",
        "--scratch=/s",
        "--claim=shop/data",
        "--persistent-volume=v",
        "--storage-class=c",
        "--raw",
        "--json",
    ];
    for (more, code) in [(&[][..], 4), (&["--dry-run"], 0), (&["--yes"], 0)] {
        let done = cluster.output(&[&given[..], more].concat());
        assert_eq!(done.stdout, b"{}\n");
        assert_eq!(done.status.code(), Some(code), "{more:?}");
        let yes = more.iter().filter(|word| **word == "--yes").copied();
        let words: Vec<_> = words.into_iter().chain(yes).collect();
        assert_eq!(cluster.runs(), [run("driver-2", "driver", &words)]);
    }
    let stdin = [
        "import-volume",
        "node-2",
        "--from=-",
        "--name",
        "n",
        "--to-pool",
        "p",
    ];
    assert_eq!(cluster.output(&stdin).status.code(), Some(64));
    assert_eq!(cluster.runs(), []);
}
