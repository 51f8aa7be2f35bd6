//! Reverts of claims to snapshots.

use serde_json::json;

use crate::changes::steps;
use crate::fixture::{World, id, without_suffix};

#[test]
fn reverts_are_planned_permitted_and_followed_to_their_end() {
    let Some(world) = World::start("reverts with kubectl slackwater") else {
        return;
    };
    world.fill();
    world.user_of_shop();
    let ready = json!({"readyToUse": true, "restoreSize": "5Gi"});
    world.snapshot("far", "cache", &id(1, 130), json!({}), ready);
    refused(&world);
    followed(&world);
    others(&world);
}

const RESOURCE: [&str; 3] = ["volumereverts", "-n", "shop"];

fn refused(world: &World) {
    let text = steps(
        world,
        &RESOURCE,
        &[
            &["revert", "-n", "shop"],
            &["revert", "data-pg-0", "-n", "shop"],
            &["revert", "--to", "before-upgrade", "-n", "shop"],
            &["revert", "data-pg-0", "--to", "x", "--group", "nightly-2"],
            &["revert", "data-pg-0", "--to", "absent", "-n", "shop"],
            &["revert", "cache", "--to", "failed", "-n", "shop", "--yes"],
            &[
                "revert",
                "data-pg-1",
                "--to",
                "before-upgrade",
                "-n",
                "shop",
                "--yes",
            ],
            &["revert", "cache", "--to", "far", "-n", "shop", "--dry-run"],
            &[
                "revert",
                "data-pg-0",
                "--to",
                "before-upgrade",
                "-n",
                "shop",
            ],
            &[
                "revert",
                "data-pg-0",
                "--to",
                "before-upgrade",
                "-n",
                "shop",
                "--yes",
                "--as",
                "dev",
            ],
            &[
                "revert",
                "data-pg-0",
                "--to",
                "before-upgrade",
                "-n",
                "shop",
                "--yes",
                "--deadline",
                "soon",
            ],
            &[
                "revert",
                "--group",
                "nightly-2",
                "-n",
                "shop",
                "--keep-old",
                "--dry-run",
            ],
        ],
    );
    insta::assert_snapshot!(
        "revert_refused",
        without_suffix(&text, "volumerevert.slackwater.dev/nightly-2-")
    );
}

fn followed(world: &World) {
    let words = [
        "revert",
        "--group",
        "nightly-2",
        "-n",
        "shop",
        "--yes",
        "--wait",
        "--keep-old",
    ];
    let member =
        |claim: &str, state: &str, old: &str| json!({"claim": claim, "state": state, "old": old});
    let done = [
        json!({"phase": "Waiting", "message": "pods use claim data-pg-0: pg-0\u{1b}[2J"}),
        json!({"phase": "Preparing", "message": "", "members": [
            member("data-pg-0", "Prepared", "before-1"), member("data-pg-1", "Fenced", "before-2")]}),
        json!({"phase": "Switching", "members": [
            member("data-pg-0", "Switched", "before-1"), member("data-pg-1", "Prepared", "before-2")]}),
        json!({"phase": "Done"}),
    ];
    let filter = "@.spec.groupSnapshot==\"nightly-2\"";
    let text = world.followed(&words, ("volumereverts", filter), &done);
    insta::assert_snapshot!("revert_done", text);
    let words = [
        "revert",
        "data-pg-1",
        "--to",
        "nightly-2-b",
        "-n",
        "shop",
        "--yes",
        "--wait",
    ];
    let failed = [
        json!({"phase": "Failed", "message": "VolumeSnapshot x was taken of another volume",
        "conditions": [{"type": "Complete", "status": "False", "reason": "SnapshotUnfit",
            "message": "", "lastTransitionTime": "2026-11-22T10:00:00Z"}]}),
    ];
    let filter = "@.spec.claim==\"data-pg-1\"";
    let text = world.followed(&words, ("volumereverts", filter), &failed);
    insta::assert_snapshot!("revert_failed", text);
}

/// Other operations on the same claims.
fn others(world: &World) {
    world.put(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
        "metadata": {"name": "running", "namespace": "shop"},
        "spec": {"claim": "data-pg-0", "snapshot": "before-upgrade"},
        "status": {"phase": "Switching"}}),
    );
    let ready = json!({"readyToUse": true, "restoreSize": "5Gi"});
    world.snapshot("near", "cache", &id(0, 131), json!({}), ready);
    let commands: [&[&str]; 2] = [
        &["revert", "--group", "nightly-2", "-n", "shop", "--yes"],
        &["revert", "cache", "--to", "near", "-n", "shop", "--yes"],
    ];
    let said = commands.map(|words| world.says(words)).join("\n");
    insta::assert_snapshot!("revert_others", said);
}
