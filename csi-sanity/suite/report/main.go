// Command report evaluates one run of csi-sanity.
//
//	report RUN REPORT.json SKIPPED.txt
//
// It prints failures, and skipped tests for which SKIPPED.txt gives no reason, to stderr, and the
// counts "PASSED FAILED SKIPPED" to stdout. A skip without a reason counts as a failure.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"regexp"
	"strings"
)

// The part of Ginkgo's report that is used.
type suite struct {
	SpecReports []spec
}

type spec struct {
	LeafNodeType            string
	LeafNodeText            string
	ContainerHierarchyTexts []string
	State                   string
	Failure                 struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}

// reason says why some tests are skipped in some runs.
type reason struct {
	runs  string
	tests *regexp.Regexp
	why   string
}

func main() {
	if len(os.Args) != 4 {
		fail("usage: report RUN REPORT.json SKIPPED.txt")
	}
	run := os.Args[1]
	var suites []suite
	text, err := os.ReadFile(os.Args[2])
	if err == nil {
		err = json.Unmarshal(text, &suites)
	}
	if err != nil {
		fail("no report of the run: " + err.Error())
	}
	listed, err := os.ReadFile(os.Args[3])
	if err != nil {
		fail(err.Error())
	}
	reasons, err := parse(string(listed))
	if err != nil {
		fail(os.Args[3] + ": " + err.Error())
	}
	var all []spec
	for _, s := range suites {
		all = append(all, s.SpecReports...)
	}
	passed, failed, skipped, notes := judge(run, all, reasons)
	for _, note := range notes {
		fmt.Fprintln(os.Stderr, note)
	}
	fmt.Println(passed, failed, skipped)
}

func fail(sentence string) {
	fmt.Fprintln(os.Stderr, sentence)
	os.Exit(1)
}

// parse reads lines of "RUNS | TESTS | WHY": a glob, a regular expression, a text for readers.
func parse(text string) ([]reason, error) {
	var reasons []reason
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := strings.SplitN(line, " | ", 3)
		if len(parts) != 3 || strings.TrimSpace(parts[2]) == "" {
			return nil, fmt.Errorf("line %d is not RUNS | TESTS | WHY", i+1)
		}
		tests, err := regexp.Compile(strings.TrimSpace(parts[1]))
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		runs := strings.TrimSpace(parts[0])
		if _, err := path.Match(runs, ""); err != nil {
			return nil, fmt.Errorf("line %d: %q: %w", i+1, runs, err)
		}
		reasons = append(reasons, reason{runs, tests, strings.TrimSpace(parts[2])})
	}
	return reasons, nil
}

// judge counts the tests of a run, with a note on each that did not pass.
func judge(run string, specs []spec, reasons []reason) (passed, failed, skipped int, notes []string) {
	for _, s := range specs {
		if s.State == "passed" {
			// Setup and teardown of the suite are not tests.
			if s.LeafNodeType == "It" {
				passed++
			}
			continue
		}
		if s.State != "skipped" && s.State != "pending" {
			failed++
			notes = append(notes, fmt.Sprintf("FAILED %s (%s)\n  %s:%d\n%s", s.name(), s.State,
				path.Base(s.Failure.Location.FileName), s.Failure.Location.LineNumber,
				indent(s.Failure.Message)))
			continue
		}
		if why := reasonFor(run, s, reasons); why != "" {
			skipped++
			notes = append(notes, fmt.Sprintf("skipped %s: %s", s.name(), why))
		} else {
			failed++
			notes = append(notes, fmt.Sprintf("FAILED %s: skipped (%q), and no reason is listed",
				s.name(), s.Failure.Message))
		}
	}
	if passed+failed+skipped == 0 {
		failed++
		notes = append(notes, "FAILED: the run had no tests")
	}
	return passed, failed, skipped, notes
}

func reasonFor(run string, s spec, reasons []reason) string {
	for _, r := range reasons {
		// The pattern was checked when it was read.
		if here, _ := path.Match(r.runs, run); here && r.tests.MatchString(s.name()) {
			return r.why
		}
	}
	return ""
}

func indent(text string) string {
	return "  " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n  ")
}
