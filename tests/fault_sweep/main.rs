//! Fails or cuts off every effect of every operation in turn, and proves that the caller's
//! repeats end where an undisturbed call ends.
//!
//! Pass 1 counts the effects of an operation. Pass 2 repeats it with the n-th effect refused,
//! done but reported as failed, or as the last thing that the process did; then as the last
//! before the power went. After each: an error that has the caller forget the object must have
//! left nothing; repeats must converge to the same answer and the same picture of the machine;
//! nothing that a user synced may be lost; and led to its end, the volume must leave nothing.
//! The same holds of a call that is made while something is wrong that lasts, once it has ended:
//! a pool that is full and stays full, a record that can't be read, from the start or from the
//! middle of a call on, a disk that dies. And of a call that fails after
//! others, of the same volume, have failed and then succeeded.

mod again;
mod cuts;
mod sweep;
mod trial;
#[path = "../world/mod.rs"]
mod world;

use slackwater::model::{FsType, Wipe};
use trial::Scenario;
use world::{How, Lasting, SIZE, Step, World};

fn sweep_repeat(before: &[Step], act: Step) {
    let before = before.to_vec();
    Scenario { before, act }.sweep_repeat();
}

fn sweep(before: &[Step], act: Step) {
    let before = before.to_vec();
    Scenario { before, act }.sweep();
}

/// What was before, and then a call that is cut off by each of its effects in turn.
fn cut_offs(before: &[Step], call: &Step) -> Vec<Vec<Step>> {
    let mut world = World::after(before);
    let effects = world.host.effects();
    world.run(call).expect("a calm call");
    let each = 1..=world.host.effects() - effects;
    let cut_off = |n| {
        let mut before = before.to_vec();
        before.push(Step::CutOff(Box::new(call.clone()), n));
        before
    };
    each.map(cut_off).collect()
}

const XFS: How = How::fs(FsType::Xfs);
const BTRFS: How = How::fs(FsType::Btrfs);
const V: &str = "v";

/// A volume that was used, and is staged no more.
fn used(how: How) -> Vec<Step> {
    let mut steps = staged(how);
    if how.fs.is_none() {
        steps.push(Step::Unpublish(V, 0));
    }
    steps.push(Step::Unstage(V));
    steps
}

/// A staged volume with a token; a block volume is published for that.
fn staged(how: How) -> Vec<Step> {
    let mut steps = vec![Step::Create(V, how), Step::Stage(V)];
    if how.fs.is_none() {
        steps.push(Step::Publish(V, 0, false));
    }
    steps.push(Step::Write(V, 7));
    steps
}

fn published(how: How) -> Vec<Step> {
    let mut steps = staged(how);
    if how.fs.is_some() {
        steps.push(Step::Publish(V, 0, false));
    }
    steps
}

#[test]
fn create() {
    for how in [How::EXT4, How::THICK, How::BLOCK] {
        sweep(&[], Step::Create(V, how));
        sweep(&[Step::Create("other", XFS)], Step::Create(V, how));
    }
}

#[test]
fn create_again_after_a_delete() {
    sweep(
        &[Step::Create(V, XFS), Step::Delete(V)],
        Step::Create(V, How::EXT4),
    );
}

#[test]
fn delete() {
    for wipe in [Wipe::None, Wipe::Zero, Wipe::Discard] {
        sweep(&used(How::EXT4.wiped(wipe)), Step::Delete(V));
        sweep(&used(How::THICK.wiped(wipe)), Step::Delete(V));
    }
    sweep(&used(How::BLOCK), Step::Delete(V));
    sweep(&[Step::Create(V, XFS)], Step::Delete(V));
}

#[test]
fn modify() {
    sweep(&used(How::EXT4), Step::Modify(V, Wipe::Discard));
}

#[test]
fn expand() {
    for how in [How::EXT4, How::THICK] {
        sweep(&used(how), Step::Expand(V, 2 * SIZE));
        sweep(&staged(how), Step::Expand(V, 2 * SIZE));
    }
}

#[test]
fn stage() {
    for how in [How::EXT4, XFS, BTRFS, How::THICK, How::BLOCK] {
        sweep(&[Step::Create(V, how)], Step::Stage(V));
    }
}

#[test]
fn stage_again() {
    for how in [How::EXT4, XFS, BTRFS, How::THICK, How::BLOCK] {
        sweep(&used(how), Step::Stage(V));
        sweep(&staged(how), Step::Stage(V));
    }
}

#[test]
fn stage_what_grew_meanwhile() {
    for how in [How::EXT4, XFS, BTRFS] {
        let mut steps = used(how);
        steps.push(Step::Expand(V, 2 * SIZE));
        sweep(&steps, Step::Stage(V));
    }
}

#[test]
fn stage_what_the_kernel_does_not_grow_while_it_is_mounted() {
    for how in [How::EXT4, How::THICK] {
        let mut steps = used(how);
        steps.extend([Step::RefuseGrowth, Step::Expand(V, 2 * SIZE)]);
        sweep(&steps, Step::Stage(V));
    }
    // A stage that was cut off before its growth.
    let mut steps = staged(How::EXT4);
    steps.extend([Step::RefuseGrowth, Step::Expand(V, 2 * SIZE)]);
    sweep(&steps, Step::Stage(V));
}

#[test]
fn stage_what_was_not_left_clean() {
    let mut steps = used(How::EXT4);
    steps.push(Step::LeaveUnclean(V));
    sweep(&steps, Step::Stage(V));
}

#[test]
fn stage_after_a_reboot() {
    for how in [XFS, How::BLOCK] {
        let mut steps = published(how);
        steps.push(Step::Reboot);
        sweep(&steps, Step::Stage(V));
    }
}

#[test]
fn publish() {
    for how in [How::EXT4, BTRFS] {
        for read_only in [false, true] {
            sweep(&staged(how), Step::Publish(V, 0, read_only));
            sweep(&published(how), Step::Publish(V, 1, read_only));
        }
    }
}

#[test]
fn publish_block() {
    let stage = [Step::Create(V, How::BLOCK), Step::Stage(V)];
    for read_only in [false, true] {
        sweep(&stage, Step::Publish(V, 0, read_only));
    }
    sweep(&published(How::BLOCK), Step::Publish(V, 1, false));
    let mut steps = published(How::BLOCK);
    steps.push(Step::Unpublish(V, 0));
    sweep(&steps, Step::Publish(V, 1, true));
}

#[test]
fn unpublish() {
    for how in [How::EXT4, BTRFS, How::BLOCK] {
        sweep(&published(how), Step::Unpublish(V, 0));
        let mut steps = published(how);
        steps.push(Step::Publish(V, 1, false));
        sweep(&steps, Step::Unpublish(V, 0));
    }
}

#[test]
fn unstage() {
    for how in [How::EXT4, BTRFS] {
        sweep(&staged(how), Step::Unstage(V));
    }
    let mut steps = staged(How::BLOCK);
    steps.push(Step::Unpublish(V, 0));
    sweep(&steps, Step::Unstage(V));
}

#[test]
fn expand_node() {
    for how in [How::EXT4, XFS, BTRFS, How::BLOCK] {
        let mut steps = staged(how);
        steps.push(Step::Expand(V, 2 * SIZE));
        sweep(&steps, Step::ExpandNode(V));
    }
}

#[test]
fn publish_inline() {
    for how in [How::EXT4, XFS, How::THICK] {
        sweep(&[], Step::PublishInline(V, how));
    }
}

#[test]
fn unpublish_inline() {
    for how in [How::EXT4, How::THICK.wiped(Wipe::Zero)] {
        sweep(
            &[Step::PublishInline(V, how), Step::Write(V, 7)],
            Step::UnpublishInline(V),
        );
    }
}

#[test]
fn start() {
    sweep(&[], Step::Start);
    sweep(&published(How::EXT4), Step::Start);
    sweep(&published(How::BLOCK), Step::Start);
    sweep(
        &[Step::PublishInline(V, XFS), Step::Write(V, 7)],
        Step::Start,
    );
}

#[test]
fn repeats_of_what_is_half_undone() {
    sweep_repeat(&[], Step::Create(V, How::THICK));
    sweep_repeat(&[], Step::PublishInline(V, How::EXT4));
    sweep_repeat(&[Step::Create(V, How::BLOCK)], Step::Stage(V));
    sweep_repeat(&used(BTRFS), Step::Stage(V));
    sweep_repeat(&staged(How::EXT4), Step::Publish(V, 0, true));
    sweep_repeat(
        &[Step::Create(V, How::BLOCK), Step::Stage(V)],
        Step::Publish(V, 0, false),
    );
    sweep_repeat(&used(How::EXT4.wiped(Wipe::Zero)), Step::Delete(V));
    sweep_repeat(&used(How::THICK), Step::Expand(V, 2 * SIZE));
}

#[test]
fn start_with_what_a_crash_left() {
    let calls = [
        (vec![], Step::Create(V, How::THICK)),
        (used(How::EXT4.wiped(Wipe::Discard)), Step::Delete(V)),
        (used(How::EXT4), Step::Expand(V, 2 * SIZE)),
        (vec![Step::Create(V, How::EXT4)], Step::Stage(V)),
        (staged(How::BLOCK)[..2].to_vec(), Step::Publish(V, 0, false)),
        (vec![], Step::PublishInline(V, How::EXT4)),
        (
            vec![Step::PublishInline(V, How::EXT4)],
            Step::UnpublishInline(V),
        ),
    ];
    for (before, call) in calls {
        for before in cut_offs(&before, &call) {
            sweep(&before, Step::Start);
        }
    }
}

#[test]
fn a_disk_that_comes_back() {
    let mut steps = used(How::EXT4);
    steps.extend([Step::PullDisk, Step::Start, Step::PutDiskBack]);
    sweep(&steps, Step::LookAgain);
}

#[test]
fn volumes_end_on_a_pool_that_is_full_and_stays_full() {
    let staged = [
        Step::Create(V, How::BLOCK),
        Step::Stage(V),
        Step::Begin(Lasting::Full),
    ];
    sweep(&staged, Step::Unstage(V));
    let mut unstaged = staged.to_vec();
    unstaged.push(Step::Unstage(V));
    sweep(&unstaged, Step::Stage(V));
    sweep(&unstaged, Step::Delete(V));
    let mut used = used(How::EXT4);
    used.push(Step::Begin(Lasting::Full));
    sweep(&used, Step::Delete(V));
}

#[test]
fn volumes_staged_read_only() {
    let how = How {
        read_only: true,
        ..XFS
    };
    let stage = [Step::Create(V, how), Step::Stage(V)];
    sweep(&stage[..1], Step::Stage(V));
    for read_only in [false, true] {
        sweep(&stage, Step::Publish(V, 0, read_only));
    }
    sweep(&[], Step::PublishInline(V, how));
}
