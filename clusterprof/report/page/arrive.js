// The last script: what the address asks for is shown once every part of the page listens.
clusterprof.arrive();
