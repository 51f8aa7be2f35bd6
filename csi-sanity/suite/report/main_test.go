package main

import (
	"slices"
	"testing"
)

func test(state, name string) spec {
	return spec{LeafNodeType: "It", LeafNodeText: name, State: state, ContainerHierarchyTexts: []string{"Node"}}
}

func TestASkipNeedsAReasonForItsRun(t *testing.T) {
	reasons, err := parse("# why\n\next4/*/* | ^Node clones | no reflink\n")
	if err != nil {
		t.Fatal(err)
	}
	specs := []spec{test("passed", "works"), test("skipped", "clones")}
	for run, want := range map[string][]int{"ext4/5.6.0/block": {1, 0, 1}, "xfs/5.6.0/block": {1, 1, 0}} {
		passed, failed, skipped, _ := judge(run, specs, reasons)
		if got := []int{passed, failed, skipped}; !slices.Equal(got, want) {
			t.Errorf("%s: %v instead of %v", run, got, want)
		}
	}
}

func TestAllButPassedAndSkippedIsFailed(t *testing.T) {
	for _, state := range []string{"failed", "panicked", "timedout", "interrupted", "aborted", ""} {
		if _, failed, _, _ := judge("run", []spec{test("passed", "a"), test(state, "b")}, nil); failed != 1 {
			t.Errorf("%q is not a failure", state)
		}
	}
}

func TestAFailedSetUpIsAFailure(t *testing.T) {
	specs := []spec{test("passed", "a"), {LeafNodeType: "BeforeSuite", State: "failed"}}
	if _, failed, _, _ := judge("run", specs, nil); failed != 1 {
		t.Error("no failure")
	}
}

func TestARunWithoutTestsIsAFailure(t *testing.T) {
	if _, failed, _, _ := judge("run", nil, nil); failed != 1 {
		t.Error("no failure")
	}
}

func TestAListWithoutReasonsIsRefused(t *testing.T) {
	for _, text := range []string{"* | x", "* | x | ", "* | ( | why", "[ | x | why"} {
		if _, err := parse(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}
