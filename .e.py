def sub(p, *pairs):
    s=open(p).read()
    for a,b in pairs:
        assert s.count(a)==1, (p,a,s.count(a))
        s=s.replace(a,b)
    open(p,'w').write(s)
sub("tests/support/crashes/crash_tracing.py",
('''    """Tries every crash of recordings. `scratch` is where images are written and recovered."""
''','''    """Tries every crash of recordings, each once. `scratch` is where images are written and recovered."""
'''),
('''    """Every so many states, the recovered run is also written to and read again."""
''','''    """Every so many states, the recovered run is also written to and read again."""
    tried: set[tuple[object, ...]] = field(default_factory=set)
    """States of the disk, each with what was promised then."""
'''),
('''        tried: set[tuple[object, ...]] = set()
        for position''','''        for position'''),
('''                if (digest, promised) in tried:
                    continue
                tried.add((digest, promised))
''','''                if (digest, promised) in self.tried:
                    continue
                self.tried.add((digest, promised))
'''),
('''                    self.recovery.check(
                        self.scratch, ledger, thorough=tally.recoveries % self.thorough_every == 0
                    )
''','''                    thorough = len(self.tried) % self.thorough_every == 0
                    self.recovery.check(self.scratch, ledger, thorough=thorough)
'''))
s=open("tests/support/crashes/crash_surveys.py").read()
s=s.replace('''    total = Tally()
    nth = 0
''','''    total = Tally()
    survey = Survey(scratch, RunRecovery(), FEW)
    nth = 0
''').replace('''        total.add(Survey(scratch, RunRecovery(), FEW)(recording))
''','''        total.add(survey(recording))
''').replace('''    total = Tally()
    disk, ledger = Disk(root), Ledger()
''','''    total = Tally()
    survey = Survey(scratch, RunRecovery(), FEW)
    disk, ledger = Disk(root), Ledger()
''').replace('''        total.add(Survey(scratch, RunRecovery(), FEW)(second, copy.deepcopy(disk), copy.deepcopy(ledger)))
''','''        total.add(survey(second, copy.deepcopy(disk), copy.deepcopy(ledger)))
''').replace('''    total = Tally()
    for image, promised''','''    total = Tally()
    survey = Survey(scratch, RunRecovery(), FEW)
    for image, promised''').replace('''        total.add(Survey(scratch, RunRecovery(), FEW)(second, Disk(root, image), promised))
''','''        total.add(survey(second, Disk(root, image), promised))
''')
open("tests/support/crashes/crash_surveys.py","w").write(s)
